// Runs the threads of one block in a random order that respects nothing but barriers and warp collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

namespace emulator {

constexpr int kWarpSize = 32;
constexpr std::size_t kDynamicAlignment = 1024;  // as in csrc/launch.cuh

struct Dim {
  unsigned x, y, z;
};

// A line of the kernel, for messages.
struct Site {
  const char* file;
  int line;
};

class Scheduler {
 public:
  static Scheduler& instance();

  // One whole grid, block after block in random order; what went wrong, or an empty string. `set_block` and
  // `set_thread` give blockIdx and threadIdx their values.
  std::string run_grid(const Dim& grid, const Dim& block, std::size_t dynamic_bytes, const std::function<void()>& body,
                       const std::function<void(const Dim&)>& set_block,
                       const std::function<void(const Dim&)>& set_thread);

  // Below: what a thread calls from inside a kernel.

  void block_barrier(const Site& site);

  // Meets the other lanes of `mask` in the same `operation`, each bringing `bytes` bytes. Returns what all brought,
  // lane i's at i * bytes; `present` are the lanes that came, those of `mask` that have not returned. Shuffles, votes
  // and tensor-core instructions are all this, and then arithmetic.
  const unsigned char* exchange(const char* operation, std::uint32_t mask, const void* payload, std::size_t bytes,
                                const Site& site, std::uint32_t* present = nullptr);

  // One variable of the block, with 0xff in every byte (NaN) when the block begins; of its exact size on the heap, so
  // that ASan sees the first byte past it.
  void* shared_variable(const Site& site, std::size_t bytes, std::size_t alignment);
  void* dynamic_shared();

  // cp.async of the calling thread: `bytes` from `source`, zeros up to `target_bytes`. The target holds 0xff from now on,
  // because the copy may begin at once, and the data from the wait on, because it may end as late as that.
  void copy_async(void* target, const void* source, std::size_t bytes, std::size_t target_bytes);
  void commit_copies();
  void wait_for_copies(std::size_t pending_groups);

  int lane() const { return current_ % kWarpSize; }
  int thread() const { return current_; }

  // Ends the block with this message; does not return to the kernel.
  void fail(const std::string& message);

 private:
  enum class State { ready, at_barrier, at_collective, done };
  struct Copy {
    void* target;
    const void* source;
    std::size_t bytes, target_bytes;
  };
  struct Thread {
    Fiber fiber;
    Dim index{};
    State state = State::ready;
    Site site{};
    const char* operation = nullptr;
    std::uint32_t mask = 0, present = 0;
    std::vector<unsigned char> brought, received;
    std::vector<Copy> begun;                     // not committed yet
    std::deque<std::vector<Copy>> copy_groups;  // oldest first
  };
  struct FreeShared {
    std::size_t alignment;
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(alignment)); }
  };
  using Shared = std::unique_ptr<void, FreeShared>;

  void run_block(const Dim& block);
  void run_round();
  bool release_barrier();
  void try_collective(int any_lane);
  void yield();
  static void enter();
  std::string describe(int thread) const;
  std::string describe_stuck() const;
  static Shared allocate_shared(std::size_t bytes, std::size_t alignment);

  Fiber home_;
  std::vector<std::unique_ptr<Thread>> threads_;  // kept from block to block, for their stacks
  int num_threads_ = 0, current_ = 0;
  std::string failure_;
  std::mt19937 random_;
  std::string skipped_barrier_;  // "name.cu:line"
  const std::function<void()>* body_ = nullptr;
  const std::function<void(const Dim&)>* set_thread_ = nullptr;
  std::size_t dynamic_bytes_ = 0, static_bytes_ = 0;
  Shared dynamic_{nullptr, FreeShared{kDynamicAlignment}};
  std::map<std::pair<std::string, int>, std::pair<Shared, std::size_t>> shared_;
};

}  // namespace emulator
