// Turns our exceptions into Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <cerrno>
#include <exception>

#include "file_error.h"

namespace fastcssl {

inline void translate_file_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const FileError& error) {
      errno = error.code().value();
      PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.path.c_str());
    }
  });
}

}  // namespace fastcssl
