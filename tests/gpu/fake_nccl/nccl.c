/* A libnccl.so.2 that does nothing: each function succeeds at once. The rest of a call's time is the way there. */
#include <stddef.h>

typedef struct { char internal[128]; } ncclUniqueId;

static int made;  /* communicators are addresses of it, which nobody looks behind */

int hpccomm_version(void) { return 99901; }  /* of no real one: so that it is noticed if that was loaded before */

const char* ncclGetErrorString(int result) { (void)result; return "of the fake libnccl"; }
const char* ncclGetLastError(void* comm) { (void)comm; return ""; }
int ncclGetVersion(int* version) { *version = hpccomm_version(); return 0; }
int ncclGetUniqueId(ncclUniqueId* id) { *id = (ncclUniqueId){{1}}; return 0; }
int ncclCommInitRank(void** comm, int size, ncclUniqueId id, int rank)
{ (void)size; (void)id; (void)rank; *comm = &made; return 0; }
int ncclCommInitRankConfig(void** comm, int size, ncclUniqueId id, int rank, void* config)
{ (void)config; return ncclCommInitRank(comm, size, id, rank); }
int ncclCommInitAll(void** comms, int count, const int* devices)
{ (void)devices; for (int i = 0; i < count; i++) comms[i] = &made; return 0; }
int ncclCommSplit(void* comm, int color, int key, void** result, void* config)
{ (void)key; (void)config; *result = color < 0 ? NULL : comm; return 0; }
int ncclCommShrink(void* comm, int* excluded, int count, void** result, void* config, int flags)
{ (void)excluded; (void)count; (void)config; (void)flags; *result = comm; return 0; }
int ncclMemAlloc(void** memory, size_t size) { (void)size; *memory = &made; return 0; }
int ncclCommWindowRegister(void* comm, void* memory, size_t size, void** window, int flags)
{ (void)comm; (void)size; (void)flags; *window = memory; return 0; }
int ncclCommGetAsyncError(void* comm, int* error) { (void)comm; *error = 0; return 0; }
int ncclCommCount(void* comm, int* count) { (void)comm; *count = 1; return 0; }
int ncclCommCuDevice(void* comm, int* device) { (void)comm; *device = 0; return 0; }
int ncclCommUserRank(void* comm, int* rank) { (void)comm; *rank = 0; return 0; }

/* As much of CUDA as compiled code calls. */
ptrdiff_t current_stream(int device) { (void)device; return 1; }
int cuCtxGetCurrent(void** context) { *context = &made; return 0; }
int cuStreamIsCapturing(void* stream, int* answer) { (void)stream; *answer = 0; return 0; }

/* The rest has nothing to hand back. In C a function may be called with arguments that it does not look at. */
#define SUCCEEDS(name) int name() { return 0; }
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclCommDestroy)
SUCCEEDS(ncclCommAbort)
SUCCEEDS(ncclCommRevoke)
SUCCEEDS(ncclMemFree)
SUCCEEDS(ncclCommWindowDeregister)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclAllReduce)
SUCCEEDS(ncclReduce)
SUCCEEDS(ncclBroadcast)
SUCCEEDS(ncclBcast)
SUCCEEDS(ncclReduceScatter)
SUCCEEDS(ncclAllGather)
SUCCEEDS(ncclAlltoAll)
SUCCEEDS(ncclSend)
SUCCEEDS(ncclRecv)
SUCCEEDS(cuEventRecord)
SUCCEEDS(cuStreamWaitEvent)
SUCCEEDS(cuEventQuery)
SUCCEEDS(cuStreamGetId)
SUCCEEDS(cuLaunchKernel)
