#include "engine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>

#include "cropper.h"

namespace fastcssl::views {
namespace {

// Threads take several small images at a time, so that they do not wait for the lock.
constexpr std::size_t kMaxGrab = 8;
// One of this many samples is timed and represents the others: reading the clock costs 1 % of a small image.
constexpr std::size_t kTimedEvery = 8;

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};

// The image of a sample is damaged. Another sample may replace it, unlike after a ShardFault.
struct SampleFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Asks the kernel to fetch a sample that will be needed soon.
void read_ahead(const MappedFile& file, std::size_t offset, std::size_t size) {
  static const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = offset / page * page;
  ::madvise(const_cast<std::uint8_t*>(file.data()) + begin, std::min(size, file.size() - offset) + offset - begin,
            MADV_WILLNEED);
}

void check_bytes(const MappedFile& file, std::size_t num_bytes) {
  if (file.size() == num_bytes) return;
  throw ShardFault(file.path() + " has " + std::to_string(file.size()) + " bytes instead of " +
                   std::to_string(num_bytes));
}

[[noreturn]] void refuse(const Shard& shard, const std::string& asked, const std::string& held) {
  throw ShardFault("The sample table names " + asked + " of " + shard.file.path() + ", which has " + held);
}

}  // namespace

// One thread's buffers, kept from sample to sample.
struct Engine::Worker {
  Cropper cropper;
  std::vector<std::uint8_t> jpeg;  // only grows
  std::vector<std::uint8_t> crop;
  std::unique_ptr<void, AlignedFree> scratch;
  std::size_t scratch_bytes = 0;
  StageSeconds spent;  // since it was last added to the engine's times
  std::chrono::steady_clock::time_point mark;
  std::size_t num_samples = 0;
  bool timed = false;

  void start() {
    timed = num_samples++ % kTimedEvery == 0;
    if (timed) mark = std::chrono::steady_clock::now();
  }
  // Adds the time since the last mark to `stage`.
  void lap(double& stage) {
    if (!timed) return;
    const auto now = std::chrono::steady_clock::now();
    stage += kTimedEvery * std::chrono::duration<double>(now - mark).count();
    mark = now;
  }

  void* scratch_for(int size_px) {
    const std::size_t wanted = photometric_scratch_bytes(size_px, size_px);
    if (wanted > scratch_bytes) {
      scratch.reset(std::aligned_alloc(64, (wanted + 63) / 64 * 64));
      if (!scratch) throw std::bad_alloc();
      scratch_bytes = wanted;
    }
    return scratch.get();
  }
};

Engine::Engine(std::vector<View> views, int num_threads) : views_(std::move(views)) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

Engine::~Engine() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

int Engine::map(const std::string& path, std::size_t num_bytes) {
  auto shard = std::make_unique<const Shard>(path);
  check_bytes(shard->file, num_bytes);
  // Samples are read in random order.
  ::madvise(const_cast<std::uint8_t*>(shard->file.data()), shard->file.size(), MADV_RANDOM);
  return add(std::move(shard));
}

int Engine::map_array(const std::string& path, std::size_t num_bytes, std::size_t data_offset, std::size_t count,
                      int height, int width) {
  auto shard = std::make_unique<Shard>(path);
  check_bytes(shard->file, num_bytes);
  const std::size_t image_bytes = height < 1 || width < 1 ? 0 : static_cast<std::size_t>(height) * width * 3;
  if (image_bytes == 0 || data_offset > num_bytes || count != (num_bytes - data_offset) / image_bytes ||
      count * image_bytes != num_bytes - data_offset)
    throw ShardFault(path + " has " + std::to_string(num_bytes) + " bytes, which are not " + std::to_string(count) +
                     " images of " + std::to_string(width) + " x " + std::to_string(height) + " pixels");
  shard->data_offset = data_offset;
  shard->count = count;
  shard->pixel_height = height;
  shard->pixel_width = width;
  return add(std::move(shard));
}

int Engine::add(std::unique_ptr<const Shard> shard) {
  std::lock_guard<std::mutex> lock(mutex_);
  shards_.push_back(std::move(shard));
  return static_cast<int>(shards_.size()) - 1;
}

void Engine::submit(const std::shared_ptr<Job>& job) {
  watch_for_lost_pages();  // somebody else may have installed a handler since the last batch
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::int32_t number : job->shard_N)
      job->file_N.push_back(shards_.at(static_cast<std::size_t>(number)).get());
  }
  for (std::size_t i = 0; i < job->shard_N.size(); ++i) {
    const Shard& shard = *job->file_N[i];
    const std::size_t offset = static_cast<std::size_t>(job->place_N[i]),
                      size = static_cast<std::size_t>(job->bytes_N[i]);
    if (shard.pixel_height == 0 && offset < shard.file.size()) read_ahead(shard.file, offset, size);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job->num_open = job->shard_N.size();
    if (job->num_open) jobs_.push_back(job);
  }
  wake_.notify_all();
}

void Engine::wait(Job& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return job.num_open == 0; });
  std::sort(job.faults.begin(), job.faults.end());
}

void Engine::cancel(Job& job) {
  std::lock_guard<std::mutex> lock(mutex_);
  job.num_open -= job.shard_N.size() - job.next;
  job.next = job.shard_N.size();
  jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(), [&](const auto& other) { return other.get() == &job; }),
              jobs_.end());
  done_.notify_all();
}

StageSeconds Engine::stage_seconds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return spent_;
}

void Engine::work() {
  Worker worker;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Job> job = jobs_.front();
    const std::size_t total = job->shard_N.size();
    const std::size_t begin = job->next;
    const std::size_t grab = std::clamp<std::size_t>((total - begin) / (4 * threads_.size()), 1, kMaxGrab);
    const std::size_t end = std::min(total, begin + grab);
    job->next = end;
    if (end == total) jobs_.pop_front();
    lock.unlock();
    for (std::size_t place = begin; place < end; ++place) do_sample(worker, *job, place);
    lock.lock();
    spent_.read += worker.spent.read;
    spent_.decode += worker.spent.decode;
    spent_.crop += worker.spent.crop;
    spent_.photometric += worker.spent.photometric;
    worker.spent = {};
    job->num_open -= end - begin;
    if (job->num_open == 0) done_.notify_all();
  }
}

void Engine::do_sample(Worker& worker, Job& job, std::size_t place) {
  std::string fault, shard_fault;
  worker.start();
  try {
    load(worker, job, place);
    const std::size_t num_samples = job.shard_N.size();
    for (std::size_t v = 0; v < views_.size(); ++v) {
      const View& view = views_[v];
      const float* box = &job.box_VN4[(v * num_samples + place) * 4];
      const std::size_t crop_bytes = static_cast<std::size_t>(view.size_px) * view.size_px * 3;
      std::uint8_t* crop;
      if (job.crops_V[v] != nullptr) {
        crop = job.crops_V[v] + place * crop_bytes;
      } else {
        worker.crop.resize(crop_bytes);
        crop = worker.crop.data();
      }
      worker.cropper.crop(box, view.filter, view.size_px, crop);
      worker.lap(worker.spent.crop);
      if (job.views_V[v] != nullptr) {
        const std::size_t value_bytes = job.type == OutType::float32 ? 4 : 2;
        photometric_image(crop, view.size_px, view.size_px, &job.columns_VNC[(v * num_samples + place) * kNumColumns],
                          view.normalisation, job.type,
                          static_cast<std::uint8_t*>(job.views_V[v]) + place * crop_bytes * value_bytes,
                          worker.scratch_for(view.size_px));
        worker.lap(worker.spent.photometric);
      }
    }
    return;
  } catch (const ShardFault& error) {
    shard_fault = error.what();
  } catch (const std::exception& error) {
    fault = error.what();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (shard_fault.empty()) job.faults.emplace_back(static_cast<int>(place), fault);
  else if (job.shard_fault.empty()) job.shard_fault = shard_fault;
}

// Loads the region of the sample that its views need.
void Engine::load(Worker& worker, const Job& job, std::size_t place) {
  const Shard& shard = *job.file_N[place];
  const std::int64_t at = job.place_N[place], num_bytes = job.bytes_N[place];
  const int width = job.width_N[place], height = job.height_N[place];
  if (shard.pixel_height > 0) {
    if (at < 0 || static_cast<std::uint64_t>(at) >= shard.count)
      refuse(shard, "row " + std::to_string(at), std::to_string(shard.count) + " rows");
    if (width != shard.pixel_width || height != shard.pixel_height)
      refuse(shard, "an image of " + std::to_string(width) + " x " + std::to_string(height) + " pixels",
             "images of " + std::to_string(shard.pixel_width) + " x " + std::to_string(shard.pixel_height));
    const std::size_t image_bytes = static_cast<std::size_t>(height) * width * 3;
    std::uint8_t* pixels = worker.cropper.room_for_pixels(width, height);
    worker.lap(worker.spent.decode);
    shard.file.read(shard.data_offset + static_cast<std::size_t>(at) * image_bytes, image_bytes, pixels);
    worker.lap(worker.spent.read);
    return;
  }
  const std::size_t size = static_cast<std::size_t>(num_bytes);
  if (at < 0 || num_bytes < 0 || static_cast<std::size_t>(at) > shard.file.size() ||
      size > shard.file.size() - static_cast<std::size_t>(at))
    refuse(shard, std::to_string(num_bytes) + " bytes at byte " + std::to_string(at),
           std::to_string(shard.file.size()) + " bytes");
  if (worker.jpeg.size() < size) worker.jpeg.resize(size);
  shard.file.read(static_cast<std::size_t>(at), size, worker.jpeg.data());
  worker.lap(worker.spent.read);
  codec::Region region{width, height, 0, 0};
  for (std::size_t v = 0; v < views_.size(); ++v)
    include(region, &job.box_VN4[(v * job.shard_N.size() + place) * 4], views_[v].filter, views_[v].size_px, width,
            height);
  std::string fault;
  const bool is_whole = worker.cropper.load_jpeg({worker.jpeg.data(), size}, width, height, region, fault);
  worker.lap(worker.spent.decode);
  if (is_whole) return;
  shard.file.check_size();  // an image is not to blame if its shard is being replaced
  throw SampleFault(fault);
}

}  // namespace fastcssl::views
