// Reads samples of one shard through the loader's engine, with the numbers of a table that may be wrong.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "input.h"
#include "views/engine.h"

namespace fuzz {

constexpr int kNumSamples = 3;
constexpr int kSizePx = 8;

// One row of the table, as it lies in the input.
struct Row {
  std::int64_t place, bytes;
  std::uint16_t width, height;
  std::uint8_t left, top, right, bottom;  // the box, as shares of the image
};

inline Row take_row(Input& input) {
  Row row;
  row.place = input.take<std::int64_t>();
  row.bytes = input.take<std::int64_t>();
  row.width = input.take<std::uint16_t>();
  row.height = input.take<std::uint16_t>();
  row.left = input.take<std::uint8_t>();
  row.top = input.take<std::uint8_t>();
  row.right = input.take<std::uint8_t>();
  row.bottom = input.take<std::uint8_t>();
  return row;
}

// A file in memory with a path.
class File {
 public:
  File(const std::uint8_t* data, std::size_t size) : fd_(::memfd_create("shard", MFD_CLOEXEC)) {
    if (fd_ < 0 || ::write(fd_, data, size) != static_cast<ssize_t>(size)) std::abort();
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

// The two views have the filters that training and evaluation use.
inline std::vector<fastcssl::views::View> two_views() {
  using fastcssl::codec::Interpolation;
  fastcssl::views::View random, center;
  random.size_px = center.size_px = kSizePx;
  random.filter = {Interpolation::bicubic, true, true};
  center.filter = {Interpolation::bilinear, true, false};
  for (int c = 0; c < 3; ++c) random.normalisation.std[c] = center.normalisation.std[c] = 1.0f;
  return {random, center};
}

// Returns a job for these rows of shard `number`, whose views are written to `out`.
inline std::shared_ptr<fastcssl::views::Job> job_for(const std::vector<Row>& rows, int number,
                                                     std::vector<std::vector<float>>& out) {
  using namespace fastcssl::views;
  auto job = std::make_shared<Job>();
  for (const Row& row : rows) {
    job->shard_N.push_back(number);
    job->place_N.push_back(row.place);
    job->bytes_N.push_back(row.bytes);
    job->width_N.push_back(row.width);
    job->height_N.push_back(row.height);
  }
  for (int v = 0; v < 2; ++v) {
    for (const Row& row : rows) {
      // As the draws make them: whole pixels inside the image that the table describes. They refuse an empty image.
      const int width = std::max<int>(row.width, 1), height = std::max<int>(row.height, 1);
      const int left = width * row.left / 256, top = height * row.top / 256;
      const int right = left + 1 + (width - left - 1) * row.right / 255;
      const int bottom = top + 1 + (height - top - 1) * row.bottom / 255;
      job->box_VN4.insert(job->box_VN4.end(), {float(left), float(top), float(right), float(bottom)});
      const float columns[kNumColumns] = {1, 0.8f, 1.2f, 1.1f, 0.1f, 5, 0, 1.0f, 128};
      job->columns_VNC.insert(job->columns_VNC.end(), columns, columns + kNumColumns);
    }
    out.emplace_back(rows.size() * kSizePx * kSizePx * 3);
  }
  for (std::vector<float>& view : out) {
    job->crops_V.push_back(nullptr);
    job->views_V.push_back(view.data());
  }
  return job;
}

// The engine is told how large a shard must be, unless it is a version that trusts the file.
template <class Engine>
int map_tar(Engine& engine, const std::string& path, std::size_t num_bytes) {
  if constexpr (requires { engine.map(path, num_bytes); }) return engine.map(path, num_bytes);
  else return engine.map(path);
}
template <class Engine>
int map_array(Engine& engine, const std::string& path, std::size_t num_bytes, std::size_t offset, std::size_t count,
              int height, int width) {
  if constexpr (requires { engine.map_array(path, num_bytes, offset, count, height, width); })
    return engine.map_array(path, num_bytes, offset, count, height, width);
  else return engine.map_array(path, offset, count, height, width);
}
template <class Job>
bool is_refused(const Job& job) {
  if constexpr (requires { job.shard_fault; }) return !job.shard_fault.empty();
  else return false;
}

// Ends the process if a row that lies outside its shard was read all the same.
inline void require_fault(const fastcssl::views::Job& job, int place, const char* what) {
  if (is_refused(job)) return;
  for (const auto& [at, reason] : job.faults)
    if (at == place) return;
  std::fprintf(stderr, "row %d lies outside its shard (%s), and was read\n", place, what);
  std::abort();
}

}  // namespace fuzz
