// Takes numbers from the front of a fuzzer's input. What is left is the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  // Returns the next number, or zero at the end.
  template <class T>
  T take() {
    T value{};
    const std::size_t count = size_ < sizeof(T) ? size_ : sizeof(T);
    std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }

  const std::uint8_t* rest() const { return data_; }
  std::size_t num_left() const { return size_; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

}  // namespace fuzz
