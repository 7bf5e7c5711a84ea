// The error for a file that the operating system refuses to open, map or read. It becomes Python's OSError.
#pragma once

#include <string>
#include <system_error>

namespace fastcssl {

struct FileError : std::system_error {
  FileError(int error, std::string file) : std::system_error(error, std::generic_category()), path(std::move(file)) {}
  std::string path;
};

}  // namespace fastcssl
