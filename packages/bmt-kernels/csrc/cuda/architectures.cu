#include "cuda/architectures.h"

std::vector<int> bmt::architectures() { return {__CUDA_ARCH_LIST__}; }
