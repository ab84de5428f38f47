// Which kernels this processor can run.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace bmt {

// Names of the instruction sets that this build has and this processor runs, best last.
std::vector<std::string> usable_instruction_sets();

// The kernels in use: the best ones, or those of the last `use_instruction_set`.
const Kernels& kernels();

// Throws std::invalid_argument for a name that is not usable.
void use_instruction_set(const std::string& name);

}  // namespace bmt
