// Compiles infonce_kernel.h for any processor.
#include "infonce/infonce_cpu.h"
#include "vector_portable.h"
// This must follow the vector layer.
#include "infonce_kernel.h"

namespace fastcssl::infonce {

void sweep_portable(const Sweep& sweep) { run(sweep); }

}  // namespace fastcssl::infonce
