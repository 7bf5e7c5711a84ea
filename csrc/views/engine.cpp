#include "engine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
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

Shard map_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw std::runtime_error(path + " cannot be opened: " + std::strerror(errno));
  struct stat info;
  Shard shard;
  if (::fstat(fd, &info) == 0) shard.size = static_cast<std::size_t>(info.st_size);
  void* data = shard.size ? ::mmap(nullptr, shard.size, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  const int error = errno;
  ::close(fd);
  if (data == MAP_FAILED) throw std::runtime_error(path + " cannot be mapped: " + std::strerror(error));
  shard.data = static_cast<const std::uint8_t*>(data);
  return shard;
}

// Asks the kernel to fetch a sample that will be needed soon.
void read_ahead(const Shard& shard, std::size_t offset, std::size_t size) {
  static const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = offset / page * page;
  ::madvise(const_cast<std::uint8_t*>(shard.data) + begin, std::min(offset + size, shard.size) - begin, MADV_WILLNEED);
}

// Reads one byte of every page, so that the wait for the disk ends, and is timed, before decoding begins.
void touch(const std::uint8_t* data, std::size_t size) {
  static const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < size; at += page)
    static_cast<void>(*static_cast<const volatile std::uint8_t*>(data + at));
  if (size) static_cast<void>(*static_cast<const volatile std::uint8_t*>(data + size - 1));
}

}  // namespace

// One thread's buffers, kept from sample to sample.
struct Engine::Worker {
  Cropper cropper;
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
  for (const Shard& shard : shards_) ::munmap(const_cast<std::uint8_t*>(shard.data), shard.size);
}

int Engine::map(const std::string& path) {
  const Shard shard = map_file(path);
  ::madvise(const_cast<std::uint8_t*>(shard.data), shard.size, MADV_RANDOM);  // samples are read in random order
  std::lock_guard<std::mutex> lock(mutex_);
  shards_.push_back(shard);
  return static_cast<int>(shards_.size()) - 1;
}

int Engine::map_array(const std::string& path, std::size_t data_offset, std::size_t count, int height, int width) {
  Shard shard = map_file(path);
  if (data_offset + count * static_cast<std::size_t>(height) * width * 3 > shard.size) {
    ::munmap(const_cast<std::uint8_t*>(shard.data), shard.size);
    throw std::runtime_error(path + " is shorter than its header says");
  }
  shard.data_offset = data_offset;
  shard.pixel_height = height;
  shard.pixel_width = width;
  std::lock_guard<std::mutex> lock(mutex_);
  shards_.push_back(shard);
  return static_cast<int>(shards_.size()) - 1;
}

void Engine::submit(const std::shared_ptr<Job>& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::int32_t number : job->shard_N) job->file_N.push_back(&shards_.at(static_cast<std::size_t>(number)));
  }
  for (std::size_t i = 0; i < job->shard_N.size(); ++i) {
    const Shard& shard = *job->file_N[i];
    const std::size_t offset = static_cast<std::size_t>(job->place_N[i]),
                      size = static_cast<std::size_t>(job->bytes_N[i]);
    if (shard.pixel_height == 0 && offset < shard.size) read_ahead(shard, offset, size);
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
  std::string fault;
  worker.start();
  try {
    if (load(worker, job, place, fault)) {
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
    }
  } catch (const std::exception& error) {
    fault = error.what();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  job.faults.emplace_back(static_cast<int>(place), fault);
}

// Loads the region of the sample that its views need.
bool Engine::load(Worker& worker, const Job& job, std::size_t place, std::string& fault) {
  const Shard& shard = *job.file_N[place];
  const std::size_t offset = static_cast<std::size_t>(job.place_N[place]);
  const std::size_t size = static_cast<std::size_t>(job.bytes_N[place]);
  if (shard.pixel_height > 0) {
    const std::size_t image_bytes = static_cast<std::size_t>(shard.pixel_height) * shard.pixel_width * 3;
    const std::uint8_t* pixels = shard.data + shard.data_offset + offset * image_bytes;
    if (worker.timed) touch(pixels, image_bytes);
    worker.lap(worker.spent.read);
    worker.cropper.load_pixels(pixels, shard.pixel_width, shard.pixel_height);
    worker.lap(worker.spent.decode);
    return true;
  }
  if (offset > shard.size || size > shard.size - offset) {
    fault = "it lies outside its shard";
    return false;
  }
  if (worker.timed) touch(shard.data + offset, size);
  worker.lap(worker.spent.read);
  const int width = job.width_N[place], height = job.height_N[place];
  codec::Region region{width, height, 0, 0};
  for (std::size_t v = 0; v < views_.size(); ++v)
    include(region, &job.box_VN4[(v * job.shard_N.size() + place) * 4], views_[v].filter, views_[v].size_px, width,
            height);
  const bool whole = worker.cropper.load_jpeg({shard.data + offset, size}, width, height, region, fault);
  worker.lap(worker.spent.decode);
  return whole;
}

}  // namespace fastcssl::views
