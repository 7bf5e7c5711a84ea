// Runs photometric_cuda under the emulator on one batch: standard input is num_images, height, width, type (int32),
// mean and std (6 float32), columns, crops; standard output is the result. Buffers have their exact size, for ASan.
// With an argument, columns and crops are not read and every pointer is null: for calls that must not touch memory.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "views/photometric.h"

namespace {

template <class T>
std::unique_ptr<T[]> read_array(std::size_t count) {
  std::unique_ptr<T[]> out(new T[count]);
  if (std::fread(out.get(), sizeof(T), count, stdin) != count) {
    std::fprintf(stderr, "standard input is too short\n");
    std::exit(2);
  }
  return out;
}

int report(const fastcssl::device::Failure& failure) {
  if (failure) std::fprintf(stderr, "photometric_cuda returned %d at %s\n", failure.error, failure.where);
  return failure ? 3 : 0;
}

}  // namespace

int main(int argc, char**) {
  using namespace fastcssl::views;
  const auto shape = read_array<int>(4);
  const auto statistics = read_array<float>(6);
  const int num_images = shape[0], height = shape[1], width = shape[2];
  const OutType type = static_cast<OutType>(shape[3]);
  Normalisation normalisation;
  std::memcpy(normalisation.mean, statistics.get(), sizeof normalisation.mean);
  std::memcpy(normalisation.std, statistics.get() + 3, sizeof normalisation.std);
  if (argc > 1) {
    return report(
        photometric_cuda(nullptr, num_images, height, width, nullptr, normalisation, type, nullptr, nullptr, nullptr));
  }

  const std::size_t num_values = static_cast<std::size_t>(num_images) * height * width * 3;
  const auto columns = read_array<float>(static_cast<std::size_t>(num_images) * kNumColumns);
  const auto crops = read_array<unsigned char>(num_values);
  const std::size_t out_bytes = num_values * (type == OutType::float32 ? 4 : 2);
  const std::size_t workspace_bytes = photometric_cuda_workspace_bytes(num_images, height, width);
  const std::unique_ptr<unsigned char[]> out(new unsigned char[out_bytes]);
  const std::unique_ptr<unsigned char[]> workspace(new unsigned char[workspace_bytes]);
  std::memset(out.get(), 0xff, out_bytes);  // NaN, where nothing is written
  std::memset(workspace.get(), 0xff, workspace_bytes);
  const fastcssl::device::Failure failure = photometric_cuda(crops.get(), num_images, height, width, columns.get(),
                                                             normalisation, type, out.get(), workspace.get(), nullptr);
  if (!failure) std::fwrite(out.get(), 1, out_bytes, stdout);
  return report(failure);
}
