// A file that is mapped for reading and may change while it is mapped.
//
// When somebody copies over a file, it is cut to nothing first. Behind the new end, the rest of the last page reads as
// zeros and every further page raises SIGBUS, which would end the process. So mapped bytes are only copied, by a
// function that notices both, and are decoded from the copy.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastcssl::views {

// A shard does not hold what was asked for, or cannot be read any more. The text names it.
struct ShardFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class MappedFile {
 public:
  // Maps a file, and closes it: a mapping needs no descriptor. Throws FileError if that fails, and ShardFault if the
  // file is empty.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::string& path() const { return path_; }

  // Copies bytes that lie inside the mapping. Throws ShardFault if the file does not have them any more.
  void read(std::size_t offset, std::size_t size, std::uint8_t* to) const;
  // Throws ShardFault if the file no longer has the size with which it was mapped.
  void check_size() const;

 private:
  std::string path_;
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  ::dev_t device_ = 0;
  ::ino_t inode_ = 0;
};

// Copies bytes of any mapping. Returns false if a page of it cannot be read.
bool copy_mapped(void* to, const void* from, std::size_t size);

// Installs the handler that copy_mapped() relies on, unless it is in place. Other SIGBUS reach the handler before it.
void watch_for_lost_pages();

}  // namespace fastcssl::views
