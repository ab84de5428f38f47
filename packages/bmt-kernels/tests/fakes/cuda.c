// A libcuda.so.1 whose streams do nothing, and whose events happen when the test says so.
#include <stdlib.h>

// What cuEventQuery says: 0, 600 (not ready) or an error. What cuEventRecord says. Whether streams are being captured. How many events there are.
int fake_status = 0, fake_record_status = 0, fake_capturing = 0, fake_events = 0, fake_recorded = 0;

int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
int cuDeviceGet(int* device, int index) { *device = 100 + index; return index < 8 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(long)device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device >= 100 ? 0 : 1; }
static __thread int depth;
int cuCtxPushCurrent_v2(void* context) { ++depth; return context != 0 ? 0 : 201; }
int cuCtxPopCurrent_v2(void** context) { --depth; *context = 0; return 0; }
int cuEventCreate(void** event, unsigned flags) {
    if (flags != 2 || depth < 1) return 1;
    *event = malloc(1);
    __atomic_add_fetch(&fake_events, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int cuEventDestroy_v2(void* event) { free(event); __atomic_add_fetch(&fake_events, -1, __ATOMIC_SEQ_CST); return 0; }
int cuEventQuery(void* event) { (void)event; return depth < 1 ? 201 : fake_status; }
int cuEventRecord(void* event, void* stream) {
    (void)event; (void)stream;
    ++fake_recorded;
    return depth < 1 ? 201 : fake_record_status;
}
int cuStreamIsCapturing(void* stream, int* is) { (void)stream; *is = fake_capturing; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode == 2 ? 0 : 1; }
int cuGetErrorName(int status, const char** name) {
    *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return 0;
}
