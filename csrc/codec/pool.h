// A pool of native threads that runs jobs and returns their results in the order of submission.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace fastcssl::codec {

template <class Result>
class Pool {
 public:
  explicit Pool(int num_threads) : shared_(std::make_shared<Shared>()) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([shared = shared_] { work(*shared); });
  }

  // Drops the jobs that have not begun. It waits a moment for the others; a thread that takes longer, such as one that
  // reads from a disk that does not answer, is left to end by itself.
  ~Pool() {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->stopping = true;
    shared_->wake.notify_all();
    const bool ended = shared_->done.wait_for(lock, std::chrono::milliseconds(500),
                                              [this] { return shared_->num_ended == threads_.size(); });
    lock.unlock();
    for (std::thread& thread : threads_) ended ? thread.join() : thread.detach();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void submit(std::function<Result()> job) {
    auto entry = std::make_shared<Entry>();
    entry->job = std::move(job);
    {
      std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->waiting.push_back(entry);
      ordered_.push_back(std::move(entry));
    }
    shared_->wake.notify_one();
  }

  // Waits for the oldest job and returns its result, or nothing if the job takes longer than `seconds`. Rethrows the
  // job's exception.
  std::optional<Result> pop(double seconds) {
    if (ordered_.empty()) throw std::logic_error("pop() without a submitted job");
    std::shared_ptr<Entry> entry = ordered_.front();
    std::unique_lock<std::mutex> lock(shared_->mutex);
    if (!shared_->done.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return entry->done; }))
      return std::nullopt;
    ordered_.pop_front();
    if (entry->error) std::rethrow_exception(entry->error);
    return std::move(entry->result);
  }

 private:
  struct Entry {
    std::function<Result()> job;
    Result result;
    std::exception_ptr error;
    bool done = false;
  };

  // Owned by the threads too, which may outlive the pool.
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake, done;
    std::deque<std::shared_ptr<Entry>> waiting;
    std::size_t num_ended = 0;
    bool stopping = false;
  };

  static void work(Shared& shared) {
    std::unique_lock<std::mutex> lock(shared.mutex);
    for (;;) {
      shared.wake.wait(lock, [&] { return shared.stopping || !shared.waiting.empty(); });
      if (shared.stopping) break;
      std::shared_ptr<Entry> entry = std::move(shared.waiting.front());
      shared.waiting.pop_front();
      lock.unlock();
      try {
        entry->result = entry->job();
      } catch (...) {
        entry->error = std::current_exception();
      }
      entry->job = nullptr;
      lock.lock();
      entry->done = true;
      shared.done.notify_all();
    }
    shared.num_ended++;
    shared.done.notify_all();
  }

  std::shared_ptr<Shared> shared_;
  std::deque<std::shared_ptr<Entry>> ordered_;  // used by the owner's thread only
  std::vector<std::thread> threads_;
};

}  // namespace fastcssl::codec
