// Fuzzes the engine's reading of tar shards: JPEGs at the places of a table. Input: the rows, then the shard.
#include "shard.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  std::vector<fuzz::Row> rows;
  for (int i = 0; i < fuzz::kNumSamples; ++i) rows.push_back(fuzz::take_row(input));
  const std::size_t num_bytes = input.num_left();
  const fuzz::File file(input.rest(), num_bytes);
  std::vector<std::vector<float>> out;
  fastcssl::views::Engine engine(fuzz::two_views(), 1);
  int number = 0;
  try {
    number = fuzz::map_tar(engine, file.path(), num_bytes);
  } catch (const std::exception&) {
    return 0;
  }
  const auto job = fuzz::job_for(rows, number, out);
  engine.submit(job);
  engine.wait(*job);
  for (int i = 0; i < fuzz::kNumSamples; ++i) {
    const auto begin = static_cast<std::uint64_t>(rows[i].place), length = static_cast<std::uint64_t>(rows[i].bytes);
    if (begin > num_bytes || length > num_bytes - begin) fuzz::require_fault(*job, i, "offset and size");
  }
  return 0;
}
