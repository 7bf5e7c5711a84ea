// A pool of native threads that runs jobs and returns their results in the order of submission.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace fastcssl::codec {

template <class Result>
class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }

  // Drops the jobs that have not begun and waits for the others.
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void submit(std::function<Result()> job) {
    auto entry = std::make_shared<Entry>();
    entry->job = std::move(job);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(entry);
      ordered_.push_back(std::move(entry));
    }
    wake_.notify_one();
  }

  // Waits for the oldest job and returns its result. Rethrows the job's exception.
  Result pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (ordered_.empty()) throw std::logic_error("pop() without a submitted job");
    std::shared_ptr<Entry> entry = ordered_.front();
    ordered_.pop_front();
    done_.wait(lock, [&] { return entry->done; });
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

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (stopping_) return;
      std::shared_ptr<Entry> entry = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      try {
        entry->result = entry->job();
      } catch (...) {
        entry->error = std::current_exception();
      }
      entry->job = nullptr;
      lock.lock();
      entry->done = true;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::shared_ptr<Entry>> waiting_, ordered_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fastcssl::codec
