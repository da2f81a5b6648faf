/* A libnccl.so.2 that does nothing itself: each function hands its name and its arguments, as 64-bit integers, to a
   hook, and returns the hook's result. So CuPy's own bindings run where there is no NCCL and no GPU. */
#include <stddef.h>
#include <stdint.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef int (*hook_t)(const char* name, const int64_t* arguments, int count);

static hook_t hook;

void set_hook(hook_t given) { hook = given; }

#define I (int64_t)
#define HOOK(...)                                                                  \
    {                                                                              \
        int64_t arguments[] = {__VA_ARGS__};                                       \
        return hook(__func__, arguments, sizeof arguments / sizeof *arguments);    \
    }

const char* ncclGetErrorString(int result) { (void)result; return "of the hook"; }
const char* ncclGetLastError(void* comm) { (void)comm; return "the hook has raised"; }
int ncclGetVersion(int* version) HOOK(I version)
int ncclGetUniqueId(ncclUniqueId* id) HOOK(I id->internal)
int ncclCommInitRankConfig(void** comm, int size, ncclUniqueId id, int rank, void* config)
    HOOK(I comm, size, I id.internal, rank, I config)
int ncclCommInitRank(void** comm, int size, ncclUniqueId id, int rank) HOOK(I comm, size, I id.internal, rank, 0)
int ncclCommInitAll(void** comms, int count, const int* devices) HOOK(I comms, count, I devices)
int ncclCommSplit(void* comm, int color, int key, void** result, void* config) HOOK(I comm, color, key, I result, I config)
int ncclCommShrink(void* comm, int* without, int count, void** result, void* config, int flags)
    HOOK(I comm, I without, count, I result, I config, flags)
int ncclCommRevoke(void* comm, int flags) HOOK(I comm, flags)
int ncclCommFinalize(void* comm) HOOK(I comm)
int ncclCommDestroy(void* comm) HOOK(I comm)
int ncclCommAbort(void* comm) HOOK(I comm)
int ncclCommGetAsyncError(void* comm, int* error) HOOK(I comm, I error)
int ncclCommCount(void* comm, int* count) HOOK(I comm, I count)
int ncclCommCuDevice(void* comm, int* device) HOOK(I comm, I device)
int ncclCommUserRank(void* comm, int* rank) HOOK(I comm, I rank)
int ncclMemAlloc(void** memory, size_t size) HOOK(I memory, I size)
int ncclMemFree(void* memory) HOOK(I memory)
int ncclCommWindowRegister(void* comm, void* memory, size_t size, void** window, int flags)
    HOOK(I comm, I memory, I size, I window, flags)
int ncclCommWindowDeregister(void* comm, void* window) HOOK(I comm, I window)
int ncclGroupStart(void) HOOK(0)
int ncclGroupEnd(void) HOOK(0)
int ncclAllReduce(void* sent, void* received, size_t count, int type, int op, void* comm, void* stream)
    HOOK(I sent, I received, I count, type, op, I comm, I stream)
int ncclReduce(void* sent, void* received, size_t count, int type, int op, int root, void* comm, void* stream)
    HOOK(I sent, I received, I count, type, op, root, I comm, I stream)
int ncclBroadcast(void* sent, void* received, size_t count, int type, int root, void* comm, void* stream)
    HOOK(I sent, I received, I count, type, root, I comm, I stream)
int ncclBcast(void* buffer, size_t count, int type, int root, void* comm, void* stream)
    HOOK(I buffer, I count, type, root, I comm, I stream)
int ncclReduceScatter(void* sent, void* received, size_t count, int type, int op, void* comm, void* stream)
    HOOK(I sent, I received, I count, type, op, I comm, I stream)
int ncclAllGather(void* sent, void* received, size_t count, int type, void* comm, void* stream)
    HOOK(I sent, I received, I count, type, I comm, I stream)
int ncclAlltoAll(void* sent, void* received, size_t count, int type, void* comm, void* stream)
    HOOK(I sent, I received, I count, type, I comm, I stream)
int ncclSend(void* sent, size_t count, int type, int peer, void* comm, void* stream)
    HOOK(I sent, I count, type, peer, I comm, I stream)
int ncclRecv(void* received, size_t count, int type, int peer, void* comm, void* stream)
    HOOK(I received, I count, type, peer, I comm, I stream)

/* NCCL 2.31: the same, by an ncclCollConfig_t. */
int ncclAllReduceConfig(void* sent, void* received, size_t count, int type, int op, void* comm, void* stream, void* config)
    HOOK(I sent, I received, I count, type, op, I comm, I stream, I config)
int ncclReduceConfig(void* sent, void* received, size_t count, int type, int op, int root, void* comm, void* stream,
                     void* config)
    HOOK(I sent, I received, I count, type, op, root, I comm, I stream, I config)
int ncclBroadcastConfig(void* sent, void* received, size_t count, int type, int root, void* comm, void* stream, void* config)
    HOOK(I sent, I received, I count, type, root, I comm, I stream, I config)
int ncclReduceScatterConfig(void* sent, void* received, size_t count, int type, int op, void* comm, void* stream,
                            void* config)
    HOOK(I sent, I received, I count, type, op, I comm, I stream, I config)
int ncclAllGatherConfig(void* sent, void* received, size_t count, int type, void* comm, void* stream, void* config)
    HOOK(I sent, I received, I count, type, I comm, I stream, I config)
int ncclAlltoAllConfig(void* sent, void* received, size_t count, int type, void* comm, void* stream, void* config)
    HOOK(I sent, I received, I count, type, I comm, I stream, I config)
