#include "scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace emulator {
namespace {

constexpr std::size_t kMaxStaticBytes = 48 << 10;
constexpr unsigned char kPoison = 0xff;

std::string from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

std::string text_of(const Site& site) { return std::string(site.file) + ":" + std::to_string(site.line); }

}  // namespace

Scheduler& Scheduler::instance() {
  static Scheduler scheduler;
  return scheduler;
}

std::string Scheduler::run_grid(const Dim& grid, const Dim& block, std::size_t dynamic_bytes,
                                const std::function<void()>& body, const std::function<void(const Dim&)>& set_block,
                                const std::function<void(const Dim&)>& set_thread) {
  random_.seed(static_cast<unsigned>(std::atoi(from_environment("EMULATOR_SEED").c_str())));
  skipped_barrier_ = from_environment("EMULATOR_SKIP_BARRIER");
  failure_.clear();
  body_ = &body;
  set_thread_ = &set_thread;
  dynamic_bytes_ = dynamic_bytes;
  std::vector<std::uint64_t> order(static_cast<std::size_t>(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::shuffle(order.begin(), order.end(), random_);
  for (std::uint64_t index : order) {
    const Dim at{static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                 static_cast<unsigned>(index / grid.x / grid.y)};
    set_block(at);
    run_block(block);
    if (failure_.empty()) continue;
    return "block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
           "): " + failure_;
  }
  return {};
}

void Scheduler::run_block(const Dim& block) {
  num_threads_ = static_cast<int>(block.x * block.y * block.z);
  while (static_cast<int>(threads_.size()) < num_threads_) threads_.push_back(std::make_unique<Thread>());
  for (int i = 0; i < num_threads_; ++i) {
    const unsigned at = static_cast<unsigned>(i);
    threads_[i]->index = {at % block.x, at / block.x % block.y, at / block.x / block.y};
    threads_[i]->state = State::ready;
    threads_[i]->begun.clear();
    threads_[i]->copy_groups.clear();
    threads_[i]->fiber.prepare(&Scheduler::enter);
  }
  shared_.clear();
  static_bytes_ = 0;
  dynamic_ = allocate_shared(dynamic_bytes_, kDynamicAlignment);
  for (;;) {
    run_round();
    if (!failure_.empty()) return;
    const auto in_state = [&](State state) {
      return std::count_if(threads_.begin(), threads_.begin() + num_threads_,
                           [&](const auto& thread) { return thread->state == state; });
    };
    if (in_state(State::done) == num_threads_) return;
    if (in_state(State::ready) > 0) continue;
    if (in_state(State::at_collective) > 0) {
      failure_ = "deadlock: " + describe_stuck();
      return;
    }
    if (!release_barrier()) return;
  }
}

// One warp after another, in an order that is drawn anew for each stretch between barriers, goes as far as it can without
// the others. So warps are as far apart as barriers allow, and a missing one shows.
void Scheduler::run_round() {
  std::vector<int> warps((num_threads_ + kWarpSize - 1) / kWarpSize), lanes(kWarpSize);
  std::iota(warps.begin(), warps.end(), 0);
  std::shuffle(warps.begin(), warps.end(), random_);
  for (int warp : warps) {
    for (bool any = true; any;) {
      any = false;
      std::iota(lanes.begin(), lanes.end(), warp * kWarpSize);
      std::shuffle(lanes.begin(), lanes.end(), random_);
      for (int thread : lanes) {
        if (thread >= num_threads_ || threads_[thread]->state != State::ready) continue;
        any = true;
        current_ = thread;
        (*set_thread_)(threads_[thread]->index);
        Fiber::switch_to(home_, threads_[thread]->fiber);
        if (!failure_.empty()) return;
      }
    }
  }
}

// All threads that have not returned wait at a barrier. The hardware would let them pass wherever they are; the
// language asks for one and the same barrier.
bool Scheduler::release_barrier() {
  int first = -1;
  for (int i = 0; i < num_threads_; ++i) {
    if (threads_[i]->state != State::at_barrier) continue;
    if (first < 0) first = i;
    const Site &site = threads_[i]->site, &expected = threads_[first]->site;
    if (site.line != expected.line || std::strcmp(site.file, expected.file) != 0) {
      failure_ = "divergent barrier: " + describe(first) + ", but " + describe(i);
      return false;
    }
  }
  for (int i = 0; i < num_threads_; ++i) {
    if (threads_[i]->state == State::at_barrier) threads_[i]->state = State::ready;
  }
  return true;
}

void Scheduler::enter() {
  Scheduler& scheduler = instance();
  Fiber::begun(scheduler.home_);
  (*scheduler.body_)();
  const int me = scheduler.current_, warp = me / kWarpSize * kWarpSize;
  scheduler.threads_[me]->state = State::done;
  // Lanes may have waited for this one alone: who has returned is not waited for.
  for (int lane = warp; lane < std::min(warp + kWarpSize, scheduler.num_threads_); ++lane) {
    if (scheduler.threads_[lane]->state == State::at_collective) scheduler.try_collective(lane);
  }
  Fiber::switch_to(scheduler.threads_[me]->fiber, scheduler.home_, true);
  std::abort();
}

void Scheduler::yield() { Fiber::switch_to(threads_[current_]->fiber, home_); }

void Scheduler::block_barrier(const Site& site) {
  if (!skipped_barrier_.empty()) {  // fault injection: as if the line were not there
    const std::string here = "/" + text_of(site), skipped = "/" + skipped_barrier_;
    if (here.size() >= skipped.size() && here.compare(here.size() - skipped.size(), skipped.size(), skipped) == 0) return;
  }
  threads_[current_]->state = State::at_barrier;
  threads_[current_]->site = site;
  yield();
}

const unsigned char* Scheduler::exchange(const char* operation, std::uint32_t mask, const void* payload,
                                         std::size_t bytes, const Site& site, std::uint32_t* present) {
  Thread& thread = *threads_[current_];
  if ((mask >> lane() & 1u) == 0) {
    fail(std::string(operation) + " at " + text_of(site) + " by lane " + std::to_string(lane()) +
         ", which its own mask leaves out");
  }
  thread.operation = operation;
  thread.mask = mask;
  thread.site = site;
  const unsigned char* data = static_cast<const unsigned char*>(payload);
  thread.brought.assign(data, data + bytes);
  thread.state = State::at_collective;
  try_collective(current_);
  // The last to come has completed it, but others of the warp may run first.
  yield();
  if (present != nullptr) *present = thread.present;
  return thread.received.data();
}

void Scheduler::copy_async(void* target, const void* source, std::size_t bytes, std::size_t target_bytes) {
  if (reinterpret_cast<std::uintptr_t>(target) % target_bytes != 0 ||
      (bytes > 0 && reinterpret_cast<std::uintptr_t>(source) % target_bytes != 0)) {
    fail("cp.async of " + std::to_string(target_bytes) + " bytes from or to an address that is not a multiple of it");
  }
  std::memset(target, kPoison, target_bytes);
  threads_[current_]->begun.push_back({target, source, bytes, target_bytes});
}

void Scheduler::commit_copies() {
  Thread& thread = *threads_[current_];
  thread.copy_groups.push_back(std::move(thread.begun));
  thread.begun.clear();
}

void Scheduler::wait_for_copies(std::size_t pending_groups) {
  Thread& thread = *threads_[current_];
  for (; thread.copy_groups.size() > pending_groups; thread.copy_groups.pop_front()) {
    for (const Copy& copy : thread.copy_groups.front()) {
      std::memset(copy.target, 0, copy.target_bytes);
      std::memcpy(copy.target, copy.source, copy.bytes);
    }
  }
}

// Completes the collective that this lane waits in when all lanes of its mask are there or have returned.
void Scheduler::try_collective(int any_lane) {
  const Thread& model = *threads_[any_lane];
  const int warp = any_lane / kWarpSize * kWarpSize;
  std::uint32_t present = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int at = warp + lane;
    if ((model.mask >> lane & 1u) == 0 || at >= num_threads_ || threads_[at]->state == State::done) continue;
    if (threads_[at]->state != State::at_collective) return;
    if (threads_[at]->mask != model.mask || std::strcmp(threads_[at]->operation, model.operation) != 0 ||
        threads_[at]->brought.size() != model.brought.size()) {
      failure_ = "divergent collective: " + describe(any_lane) + ", but " + describe(at);
      return;
    }
    present |= 1u << lane;
  }
  const std::size_t bytes = model.brought.size();
  std::vector<unsigned char> all(bytes * kWarpSize, kPoison);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (present >> lane & 1u) std::copy_n(threads_[warp + lane]->brought.data(), bytes, all.data() + lane * bytes);
  }
  // Each gets a copy of its own: the quick ones may be at the next collective before the slow ones have looked.
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((present >> lane & 1u) == 0) continue;
    threads_[warp + lane]->received = all;
    threads_[warp + lane]->present = present;
    threads_[warp + lane]->state = State::ready;
  }
}

Scheduler::Shared Scheduler::allocate_shared(std::size_t bytes, std::size_t alignment) {
  Shared memory(::operator new(bytes, std::align_val_t(alignment)), FreeShared{alignment});
  std::memset(memory.get(), kPoison, bytes);
  return memory;
}

void* Scheduler::shared_variable(const Site& site, std::size_t bytes, std::size_t alignment) {
  const auto key = std::make_pair(std::string(site.file), site.line);
  auto found = shared_.find(key);
  if (found == shared_.end()) {
    static_bytes_ += bytes;
    if (static_bytes_ > kMaxStaticBytes) {
      fail("static shared memory of " + std::to_string(static_bytes_) + " bytes; 49152 are allowed");
    }
    found = shared_.emplace(key, std::make_pair(allocate_shared(bytes, alignment), bytes)).first;
  }
  return found->second.first.get();
}

void* Scheduler::dynamic_shared() { return dynamic_.get(); }

void Scheduler::fail(const std::string& message) {
  failure_ = message;
  yield();
  std::abort();
}

std::string Scheduler::describe(int thread) const {
  const Thread& it = *threads_[thread];
  const std::string name = "thread " + std::to_string(thread);
  switch (it.state) {
    case State::at_barrier:
      return name + " waits at the barrier " + text_of(it.site);
    case State::at_collective:
      return name + " waits in " + it.operation + " at " + text_of(it.site) + " with mask " + std::to_string(it.mask);
    case State::done:
      return name + " has returned";
    case State::ready:
      break;
  }
  return name + " is running";
}

std::string Scheduler::describe_stuck() const {
  std::string text;
  for (State state : {State::at_collective, State::at_barrier, State::done}) {
    for (int i = 0; i < num_threads_; ++i) {
      if (threads_[i]->state != state) continue;
      text += (text.empty() ? "" : "; ") + describe(i);
      break;
    }
  }
  return text;
}

}  // namespace emulator
