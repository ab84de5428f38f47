// A libnccl.so.2 of one process in which every member of a group does what this one does, on the host's memory. It has the
// interface of the real one, and lets tests choose what goes wrong.
#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char* net_name;
    int split_share;
} Config;
typedef struct { int size, rank; volatile int inside, is_over; } Comm;

// Whether calls block, as when another member does not come; what ncclCommGetAsyncError says; what calls return.
volatile int fake_blocks = 0, fake_async_error = 0, fake_result = 0;
volatile int fake_deaf = 0;  // whether what blocks hears of no abort: it naps between attempts to connect
volatile int fake_inside = 0;  // communicators that were given back while a call was inside: the real one's would be freed
volatile int fake_thread = 0;  // that was last inside
int fake_microseconds = 0;  // that a reduction takes on the host
int fake_asking = 0;  // microseconds that ncclCommGetAsyncError takes
volatile int fake_torn = 0;  // calls of it during which a communicator was given back
volatile int fake_finalized = 0, fake_destroyed = 0, fake_aborted = 0, fake_depth = 0, fake_ungrouped = 0;

static int started(Comm* comm) {
    fake_thread = gettid();
    ++comm->inside;
    while (fake_blocks && (fake_deaf || !comm->is_over)) usleep(1000);
    --comm->inside;
    return comm->is_over ? 3 : fake_result;
}

#ifndef FAKE_VERSION
#define FAKE_VERSION 22809
#endif
int ncclGetVersion(int* version) { *version = FAKE_VERSION; return 0; }
#ifndef FAKE_WITHOUT_UNIQUE_ID
int ncclGetUniqueId(Id* id) {
    static int made = 0;
    const int own[2] = {getpid(), made++};  // no other process makes the same
    for (int i = 0; i < 128; ++i) id->bytes[i] = (char)i;
    memcpy(id->bytes, own, sizeof own);
    return 0;
}
#endif
int ncclCommInitRankConfig(Comm** comm, int size, Id id, int rank, Config* config) {
    for (int i = 2 * sizeof(int); i < 128; ++i)
        if (id.bytes[i] != (char)i) return 4;  // not one of ours
    if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->blocking != 1) return 4;
    *comm = malloc(sizeof(Comm));
    **comm = (Comm){size, rank, 0, 0};
    return started(*comm);
}
int ncclCommFinalize(Comm* comm) { __atomic_add_fetch(&fake_finalized, 1, __ATOMIC_SEQ_CST); return started(comm); }
static int given_back(Comm* comm, volatile int* count) {
    fake_inside += comm->inside > 0;
    comm->is_over = 1;
    __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);  // communicators are aborted side by side
    return 0;
}
int ncclCommDestroy(Comm* comm) { return given_back(comm, &fake_destroyed); }
int ncclCommAbort(Comm* comm) { return given_back(comm, &fake_aborted); }
int ncclCommGetAsyncError(Comm* comm, int* error) {
    (void)comm;
    const int before = fake_destroyed + fake_aborted;
    usleep(fake_asking);
    fake_torn += before != fake_destroyed + fake_aborted;
    *error = fake_async_error;
    return 0;
}
const char* ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "some error"; }
const char* ncclGetLastError(Comm* comm) { (void)comm; return "cable unplugged"; }
static __thread Comm* grouped;
int ncclGroupStart(void) { ++fake_depth; return 0; }
int ncclGroupEnd(void) { --fake_depth; return started(grouped); }

static const size_t size_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

int ncclAllGather(const void* input, void* output, size_t count, int type, Comm* comm, void* stream) {
    (void)stream;
    const size_t bytes = count * size_of[type];
    for (int i = 0; i < comm->size; ++i) memmove((char*)output + i * bytes, input, bytes);
    return started(comm);
}
static void reduce(const float* input, float* output, size_t count, int op, Comm* comm) {
    usleep(fake_microseconds);
    for (size_t i = 0; i < count; ++i) {
        const float x = input[i];
        float product = 1;
        for (int k = 0; k < comm->size; ++k) product *= x;
        output[i] = op == 0 ? comm->size * x : op == 1 ? product : x;
    }
}
int ncclReduceScatter(const void* input, void* output, size_t count, int type, int op, Comm* comm, void* stream) {
    (void)stream;
    if (type != 7) return 4;
    reduce((const float*)input + comm->rank * count, output, count, op, comm);
    return started(comm);
}
int ncclAllReduce(const void* input, void* output, size_t count, int type, int op, Comm* comm, void* stream) {
    (void)stream;
    if (type != 7) return 4;
    reduce(input, output, count, op, comm);
    return started(comm);
}
int ncclBroadcast(const void* input, void* output, size_t count, int type, int root, Comm* comm, void* stream) {
    (void)stream; (void)type;
    if (root >= comm->size) return 4;
    memmove(output, input, count);
    return started(comm);
}
int ncclSend(const void* input, size_t count, int type, int peer, Comm* comm, void* stream) {
    (void)input; (void)count; (void)type; (void)stream;
    fake_ungrouped += fake_depth == 0;
    grouped = comm;
    return peer < comm->size ? fake_result : 4;
}
// What arrives says whom it is from.
int ncclRecv(void* output, size_t count, int type, int peer, Comm* comm, void* stream) {
    (void)type; (void)stream;
    fake_ungrouped += fake_depth == 0;
    grouped = comm;
    memset(output, peer, count);
    return peer < comm->size ? fake_result : 4;
}
