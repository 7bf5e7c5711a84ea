// The engine of the loader: native threads decode each stored sample once and turn it into crops or finished views.
//
// A job is one batch. Workers take a few of its samples at a time. They decode the union of the views' boxes once,
// resize each box into the batch's buffer, and apply the photometry in the same pass if asked to. The result depends
// only on the sample and its parameters.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../codec/resize.h"
#include "mapped_file.h"
#include "photometric.h"

namespace fastcssl::views {

struct View {
  int size_px = 0;
  codec::Filter filter;
  Normalisation normalisation{};
};

// A mapped file. If `pixel_height` > 0, it holds an array of `count` images of one size from `data_offset` on; otherwise
// JPEGs.
struct Shard {
  explicit Shard(const std::string& path) : file(path) {}

  MappedFile file;
  std::size_t data_offset = 0;
  std::size_t count = 0;
  int pixel_height = 0;
  int pixel_width = 0;
};

// A batch of N samples with V views. The engine writes a view's crops, its finished images or both, depending on which
// pointers are given.
struct Job {
  std::vector<std::int32_t> shard_N;
  std::vector<std::int64_t> place_N;  // byte offset of a JPEG, or row in an array
  std::vector<std::int64_t> bytes_N;
  std::vector<std::int32_t> width_N, height_N;  // as prepared
  std::vector<float> box_VN4;
  std::vector<float> columns_VNC;
  std::vector<std::uint8_t*> crops_V;  // [N, size, size, 3] each, or null
  std::vector<void*> views_V;          // [N, size, size, 3] of `type` each, or null
  OutType type = OutType::float32;

  // Used by the engine.
  std::vector<const Shard*> file_N;  // filled by submit(), so that workers never read the list that map() extends
  std::size_t next = 0, num_open = 0;
  std::vector<std::pair<int, std::string>> faults;  // the samples that could not be decoded
  std::string shard_fault;                          // why a shard could not be read; empty if all could
};

// Seconds that the threads spent in each stage, summed over the threads and estimated from some of the samples. Reading
// is the wait for pages that are not in memory yet.
struct StageSeconds {
  double read = 0, decode = 0, crop = 0, photometric = 0;
};

class Engine {
 public:
  Engine(std::vector<View> views, int num_threads);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Maps a file until the engine is destroyed and returns its number. Throws FileError if the operating system refuses,
  // and ShardFault if the file does not have `num_bytes`.
  int map(const std::string& path, std::size_t num_bytes);
  // The same for an array of images [count, height, width, 3], whose pixels fill the file from `data_offset` on.
  int map_array(const std::string& path, std::size_t num_bytes, std::size_t data_offset, std::size_t count, int height,
                int width);

  void submit(const std::shared_ptr<Job>& job);
  // Waits until every sample of the job is done or skipped. Faults are sorted by place.
  void wait(Job& job);
  // Skips the samples that have not begun. wait() then returns when the others are done.
  void cancel(Job& job);
  // Returns the times since the engine was created.
  StageSeconds stage_seconds();

 private:
  struct Worker;
  void work();
  void do_sample(Worker& worker, Job& job, std::size_t place);
  void load(Worker& worker, const Job& job, std::size_t place);
  int add(std::unique_ptr<const Shard> shard);

  std::vector<View> views_;
  std::vector<std::unique_ptr<const Shard>> shards_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::shared_ptr<Job>> jobs_;
  StageSeconds spent_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fastcssl::views
