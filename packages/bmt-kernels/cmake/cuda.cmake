# The module for CUDA, where nvcc is found. It loads beside torch, whatever CUDA runtime torch brings: its own is linked in.

# Leaves the module out, says why in one line, and has the CPU module tell it to `bmt doctor`. It is an error if BMT_CUDA=ON.
macro(bmt_leave_cuda_out reason)
  if(BMT_CUDA STREQUAL ON)
    message(FATAL_ERROR "BMT_CUDA=ON, and the CUDA module cannot be built: ${reason}.")
  endif()
  message(STATUS "bmt-kernels: the CUDA module is left out: ${reason}")
  set(bmt_without_cuda "${reason}")
endmacro()

if(BMT_CUDA STREQUAL OFF)
  bmt_leave_cuda_out("BMT_CUDA=OFF")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  find_program(bmt_nvcc NAMES $ENV{CUDACXX} nvcc)
  if(bmt_nvcc)
    bmt_leave_cuda_out("${bmt_nvcc} cannot compile a program with the C++ compiler ${CMAKE_CXX_COMPILER}")
  else()
    bmt_leave_cuda_out("no nvcc is found on PATH, and CUDACXX is not set")
  endif()
  return()
endif()

find_package(CUDAToolkit)
if(NOT TARGET CUDA::cudart_static)
  bmt_leave_cuda_out("the CUDA toolkit of ${CMAKE_CUDA_COMPILER} has no headers or no libcudart_static.a")
  return()
endif()
if(CUDAToolkit_VERSION VERSION_LESS 12.4)
  bmt_leave_cuda_out("${CMAKE_CUDA_COMPILER} is of CUDA ${CUDAToolkit_VERSION}, older than 12.4")
  return()
endif()

# Semicolons or commas between numbers such as 80, 90a, 100-real; see CMAKE_CUDA_ARCHITECTURES in CMake's manual.
if(DEFINED ENV{BMT_CUDA_ARCHITECTURES} AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  string(REPLACE "," ";" CMAKE_CUDA_ARCHITECTURES "$ENV{BMT_CUDA_ARCHITECTURES}")
elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES all-major)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_ARCHITECTURES STREQUAL all-major AND CUDAToolkit_VERSION VERSION_LESS 13)
  # Without those before sm_70, whose kernels take fewer parameters.
  set(CMAKE_CUDA_ARCHITECTURES 70 80 90)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# CMake before 3.25.2, such as that of Debian 12, does not know that nvcc compiles C++20.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()

pybind11_add_module(
  _cuda NO_EXTRAS
  csrc/cuda/module.cpp
  csrc/cuda/peer.cpp
  csrc/cuda/adam.cu
  csrc/cuda/architectures.cu
  csrc/cuda/casts.cu
  csrc/cuda/cross_entropy.cu
  csrc/cuda/gradients.cu
)
set_source_files_properties(csrc/cuda/module.cpp PROPERTIES COMPILE_OPTIONS -O1)
set_target_properties(_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
target_include_directories(_cuda PRIVATE csrc)
target_link_libraries(_cuda PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})
target_compile_options(
  _cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>
)
message(STATUS "bmt-kernels: CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")

install(TARGETS _cuda LIBRARY DESTINATION bmt_kernels)
