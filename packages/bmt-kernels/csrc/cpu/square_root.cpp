#include "cpu/square_root.h"

#include <atomic>

namespace bmt {
namespace {

// void vmsSqrt(const MKL_INT n, const float a[], float r[], MKL_INT64 mode), with 32-bit MKL_INT as torch is built.
using VmsSqrt = void(int count, const float* x, float* y, long long mode);

// VML_HA, VML_FTZDAZ_OFF and VML_ERRMODE_IGNORE of mkl_vml_defines.h: what torch passes.
constexpr long long mode = 0x00000002 | 0x00140000 | 0x00000100;

std::atomic<VmsSqrt*> vms_sqrt{nullptr};

void mkl_square_root(const float* x, float* y, std::size_t count) {
    vms_sqrt.load(std::memory_order_relaxed)(static_cast<int>(count), x, y, mode);
}

}  // namespace

void use_mkl_square_root(std::uintptr_t address) { vms_sqrt.store(reinterpret_cast<VmsSqrt*>(address)); }

SquareRoot* square_root() { return vms_sqrt.load() == nullptr ? nullptr : mkl_square_root; }

}  // namespace bmt
