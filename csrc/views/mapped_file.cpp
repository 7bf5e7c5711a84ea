#include "mapped_file.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "../file_error.h"

namespace fastcssl::views {
namespace {

// A copy in progress.
struct Copy {
  sigjmp_buf jump;
  std::uintptr_t begin, end;
};

// Set by the thread before it copies, so the signal handler finds it allocated.
thread_local Copy* current = nullptr;

struct sigaction before;
std::atomic<bool> is_passed_on{false};

std::uintptr_t page_bytes() {
  static const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

void on_bus_error(int number, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  Copy* const copy = current;
  if (copy != nullptr && info->si_code > 0 && at >= copy->begin && at < copy->end) siglongjmp(copy->jump, 1);
  // Not ours. The instruction runs again when this returns, and then meets the handler before this one, or ends the
  // process if that handler has already had its turn.
  struct sigaction other = before;
  if (is_passed_on.exchange(true)) {
    other = {};
    other.sa_handler = SIG_DFL;
  }
  ::sigaction(number, &other, nullptr);
  if (info->si_code <= 0) ::raise(number);  // sent by a process, so it does not come again by itself
}

}  // namespace

void watch_for_lost_pages() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  page_bytes();
  struct sigaction now;
  if (::sigaction(SIGBUS, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus_error) return;
  before = now;
  is_passed_on = false;
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  // Without SA_NODEFER, the signal would stay blocked after the jump out of the handler.
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGBUS, &ours, nullptr);
}

bool copy_mapped(void* to, const void* from, std::size_t size) {
  if (size == 0) return true;  // `to` may be null
  Copy copy;
  copy.begin = reinterpret_cast<std::uintptr_t>(from) / page_bytes() * page_bytes();
  copy.end = reinterpret_cast<std::uintptr_t>(from) + size;
  if (sigsetjmp(copy.jump, 0) != 0) {
    current = nullptr;
    return false;
  }
  current = &copy;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memcpy(to, from, size);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  current = nullptr;
  return true;
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw FileError(errno, path);
  struct stat info = {};
  const bool is_known = ::fstat(fd, &info) == 0;
  size_ = static_cast<std::size_t>(info.st_size);
  device_ = info.st_dev;
  inode_ = info.st_ino;
  void* data = is_known && size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  const int error = errno;
  ::close(fd);
  if (is_known && size_ == 0) throw ShardFault(path + " is empty");
  if (data == MAP_FAILED) throw FileError(error, path);
  data_ = static_cast<const std::uint8_t*>(data);
  watch_for_lost_pages();
}

MappedFile::~MappedFile() { ::munmap(const_cast<std::uint8_t*>(data_), size_); }

void MappedFile::read(std::size_t offset, std::size_t size, std::uint8_t* to) const {
  bool is_read = copy_mapped(to, data_ + offset, size);
  // A zero at the end may lie behind the end of a file that was cut short, on its last page. If the file has its size,
  // what was read before it got that size back is read again.
  if (is_read && size && to[size - 1] == 0) {
    check_size();
    is_read = copy_mapped(to, data_ + offset, size);
  }
  if (is_read) return;
  check_size();
  throw ShardFault(path_ + " could not be read at byte " + std::to_string(offset) +
                   ": it was written while it was in use, or the disk failed");
}

void MappedFile::check_size() const {
  struct stat info;
  // If the name now belongs to another file or to none, the mapped one still exists as it was.
  if (::stat(path_.c_str(), &info) != 0 || info.st_dev != device_ || info.st_ino != inode_) return;
  if (static_cast<std::size_t>(info.st_size) == size_) return;
  throw ShardFault(path_ + " has " + std::to_string(info.st_size) + " bytes instead of " + std::to_string(size_) +
                   ": it was changed while it was in use");
}

}  // namespace fastcssl::views
