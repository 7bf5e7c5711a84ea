// A stack of its own for every CUDA thread, and the switch between two of them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

#if defined(__x86_64__)
// Saves what the calling convention asks of a callee on the old stack, and takes it from the new one.
extern "C" void fastcssl_emulator_switch(void** save_stack, void* load_stack);
asm(R"(
.pushsection .text
.weak fastcssl_emulator_switch
.type fastcssl_emulator_switch, @function
fastcssl_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fastcssl_emulator_switch, .-fastcssl_emulator_switch
.popsection
)");
#endif

// A place where execution can be left and taken up again: the scheduler's own stack, or a thread's.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (memory_ != nullptr) munmap(memory_, kStackBytes + kGuardBytes);
  }

  // Makes `entry` run from the beginning at the next switch. It must never return.
  void prepare(void (*entry)()) {
    if (memory_ == nullptr) {
      void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      mprotect(memory, kGuardBytes, PROT_NONE);  // a stack overflow is a fault, not another thread's trouble
      memory_ = static_cast<char*>(memory);
      bottom_ = memory_ + kGuardBytes;
      bytes_ = kStackBytes;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(bottom_, kStackBytes);  // what an unfinished predecessor left
#endif
#if defined(__x86_64__)
    // Six registers, the return address, and one word so that the stack is aligned as after a call.
    void** top = reinterpret_cast<void**>(memory_ + kGuardBytes + kStackBytes) - 8;
    for (int i = 0; i < 8; ++i) top[i] = nullptr;
    top[6] = reinterpret_cast<void*>(entry);
    stack_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = memory_ + kGuardBytes;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // Leaves `from`, goes on in `to`, and returns when somebody switches back to `from`; never, when it is finished.
  static void switch_to(Fiber& from, Fiber& to, bool finished = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(finished ? nullptr : &from.fake_stack_, to.bottom_, to.bytes_);
#else
    (void)finished;
#endif
#if defined(__x86_64__)
    fastcssl_emulator_switch(&from.stack_, to.stack_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
    arrived(from.fake_stack_);
  }

  // The first thing that a fiber does. Tells the sanitizer, and learns from it where `caller` has its stack.
  static void begun(Fiber& caller) { arrived(nullptr, &caller); }

 private:
#if defined(__SANITIZE_ADDRESS__) || defined(EMULATOR_PTX)
  static constexpr std::size_t kStackBytes = 256 << 10;
#else
  static constexpr std::size_t kStackBytes = 64 << 10;
#endif
  static constexpr std::size_t kGuardBytes = 4096;

  static void arrived([[maybe_unused]] void* fake_stack, [[maybe_unused]] Fiber* caller = nullptr) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
    if (caller != nullptr) {
      caller->bottom_ = bottom;
      caller->bytes_ = bytes;
    }
#endif
  }

  char* memory_ = nullptr;
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
#if defined(__x86_64__)
  void* stack_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace emulator
