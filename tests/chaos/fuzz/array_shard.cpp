// Fuzzes the engine's reading of array shards. Input: what the .npy header says, the rows, then the shard.
#include "shard.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  // numpy has read these from the header and checked that they are not negative.
  const std::size_t offset = input.take<std::uint64_t>() & INT64_MAX, count = input.take<std::uint64_t>() & INT64_MAX;
  const int height = static_cast<int>(input.take<std::uint32_t>() & INT32_MAX);
  const int width = static_cast<int>(input.take<std::uint32_t>() & INT32_MAX);
  std::vector<fuzz::Row> rows;
  for (int i = 0; i < fuzz::kNumSamples; ++i) rows.push_back(fuzz::take_row(input));
  const std::size_t num_bytes = input.num_left();
  const fuzz::File file(input.rest(), num_bytes);
  std::vector<std::vector<float>> out;
  fastcssl::views::Engine engine(fuzz::two_views(), 1);
  int number = 0;
  try {
    number = fuzz::map_array(engine, file.path(), num_bytes, offset, count, height, width);
  } catch (const std::exception&) {
    return 0;
  }
  const auto job = fuzz::job_for(rows, number, out);
  engine.submit(job);
  engine.wait(*job);
  for (int i = 0; i < fuzz::kNumSamples; ++i)
    if (static_cast<std::uint64_t>(rows[i].place) >= count) fuzz::require_fault(*job, i, "row of the array");
  return 0;
}
