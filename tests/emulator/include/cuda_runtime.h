// Found before the toolkit's when a .cu is compiled for the emulator.
#pragma once

#include "cuda_emulator.h"
