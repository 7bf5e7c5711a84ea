// The decode-once, many-views engine: native threads turn stored samples into crops, or into finished views.
//
// A job is one batch. Workers take its samples a few at a time: decode the union of the views' boxes once, resize each
// box into the batch's buffer, and do the photometry in the same pass when asked. What a sample becomes depends on nothing
// but the sample and its parameters.
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
#include "photometric.h"

namespace fastcssl::views {

struct View {
  int size_px = 0;
  codec::Filter filter;
  Normalisation normalisation{};
};

// A file in memory. `pixel_height` > 0: an array of images of one size that begins at `data_offset`; else JPEGs.
struct Shard {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
  std::size_t data_offset = 0;
  int pixel_height = 0;
  int pixel_width = 0;
};

// N samples, V views. A view's crops or its finished images are written, whichever pointer is given.
struct Job {
  std::vector<std::int32_t> shard_N;
  std::vector<std::int64_t> place_N;  // byte offset of a JPEG, or row of an array
  std::vector<std::int64_t> bytes_N;
  std::vector<std::int32_t> width_N, height_N;  // as prepared
  std::vector<float> box_VN4;
  std::vector<float> columns_VNC;
  std::vector<std::uint8_t*> crops_V;  // [N, size, size, 3] each, or null
  std::vector<void*> views_V;          // [N, size, size, 3] of `type` each, or null
  OutType type = OutType::float32;

  // Kept by the engine.
  std::vector<const Shard*> file_N;  // resolved when submitted: a worker never reads the list that map() grows
  std::size_t next = 0, num_open = 0;
  std::vector<std::pair<int, std::string>> faults;
};

// What the threads spent, in seconds added up over them, estimated from some of their samples. Reading is waiting for
// pages that are not in memory yet.
struct StageSeconds {
  double read = 0, decode = 0, crop = 0, photometric = 0;
};

class Engine {
 public:
  Engine(std::vector<View> views, int num_threads);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Maps a file for the engine's life. Throws std::runtime_error with the reason.
  int map(const std::string& path);
  // The same for an array of images [count, height, width, 3]; `data_offset` is where its pixels begin in the file.
  int map_array(const std::string& path, std::size_t data_offset, std::size_t count, int height, int width);

  void submit(const std::shared_ptr<Job>& job);
  // Until every sample of the job is done or skipped. Faults are sorted by place.
  void wait(Job& job);
  // Skips the samples that have not begun; wait() then returns as soon as the others are done.
  void cancel(Job& job);
  // Since the engine was made.
  StageSeconds stage_seconds();

 private:
  struct Worker;
  void work();
  void do_sample(Worker& worker, Job& job, std::size_t place);
  bool load(Worker& worker, const Job& job, std::size_t place, std::string& fault);

  std::vector<View> views_;
  std::deque<Shard> shards_;  // a deque, so that adding one moves no other
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::shared_ptr<Job>> jobs_;
  StageSeconds spent_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fastcssl::views
