// A CUDA runtime without a card: enough of it for torch to take "cuda:0" for a device whose tensors are all fake.
//
// Preloaded before libcudart, it answers questions about devices, hands out streams and events, and keeps a log of what
// was ordered after what. It cannot compute: launching a kernel, or allocating or copying device memory, is an error,
// because under FakeTensorMode nothing should do so. The environment sets the card: FAKE_CUDA_CAPABILITY (such as 90),
// FAKE_CUDA_DEVICES. The same file is also built as libcuda.so.1, which torch opens by name.
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOG_SIZE = 1 << 20 };
enum Kind { RECORD = 1, WAIT = 2, STREAM_SYNC = 3, EVENT_SYNC = 4, DEVICE_SYNC = 5, EVENT_QUERY = 6 };
struct Entry {
  long long kind, stream, event;
};
static struct Entry entries[LOG_SIZE];
static long long num_entries;
static _Thread_local int current_device;

static cudaError_t logged(enum Kind kind, cudaStream_t stream, cudaEvent_t event) {
  long long at = __sync_fetch_and_add(&num_entries, 1);
  if (at >= LOG_SIZE) {
    fprintf(stderr, "fake CUDA: the log is full\n");
    abort();
  }
  entries[at] = (struct Entry){kind, (long long)(size_t)stream, (long long)(size_t)event};
  return cudaSuccess;
}

static cudaError_t refused(const char* what) {
  fprintf(stderr, "fake CUDA: %s was called, so some tensor was not fake\n", what);
  return cudaErrorUnknown;
}

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

// ---- For the tests, by ctypes ----

long long fake_cuda_log_size(void) { return num_entries; }
void fake_cuda_log_read(long long at, long long* out_3) { memcpy(out_3, &entries[at], sizeof(struct Entry)); }
void fake_cuda_log_clear(void) { num_entries = 0; }

// ---- Devices ----

cudaError_t cudaGetDeviceCount(int* count) { return *count = setting("FAKE_CUDA_DEVICES", 1), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* prop, int device) {
  (void)device;
  memset(prop, 0, sizeof *prop);
  snprintf(prop->name, sizeof prop->name, "Fake card");
  prop->major = setting("FAKE_CUDA_CAPABILITY", 90) / 10;
  prop->minor = setting("FAKE_CUDA_CAPABILITY", 90) % 10;
  prop->totalGlobalMem = (size_t)80 << 30;
  prop->multiProcessorCount = 132;
  prop->warpSize = 32;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsPerMultiProcessor = 2048;
  prop->sharedMemPerBlock = 48 << 10;
  prop->sharedMemPerBlockOptin = 227 << 10;
  prop->regsPerMultiprocessor = 65536;
  prop->maxGridSize[0] = prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  int capability = setting("FAKE_CUDA_CAPABILITY", 90);
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? capability % 10
                                                            : 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return snprintf(text, size, "0000:%02x:00.0", device), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) { return *unused = *total = (size_t)80 << 30, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return (void)device, (void)peer, *can = 0, cudaSuccess;
}

// ---- Streams and events ----

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
static size_t new_handle(void) {
  static size_t last = 4096;
  return __sync_add_and_fetch(&last, 16);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return (void)flags, (void)priority, *stream = (cudaStream_t)new_handle(), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return (void)stream, cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return (void)stream, *priority = 0, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  return (void)stream, *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  (void)stream, (void)id, (void)graph, (void)nodes, (void)edges, (void)count;
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { return (void)mode, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return (void)stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return logged(STREAM_SYNC, stream, NULL); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return (void)flags, logged(WAIT, stream, event);
}
cudaError_t cudaDeviceSynchronize(void) { return logged(DEVICE_SYNC, NULL, NULL); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return (void)flags, *event = (cudaEvent_t)new_handle(), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return (void)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return logged(RECORD, stream, event); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return (void)flags, logged(RECORD, stream, event);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return logged(EVENT_QUERY, NULL, event); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return logged(EVENT_SYNC, NULL, event); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  return (void)begin, (void)end, *ms = 1.0f, cudaSuccess;
}

// ---- Memory: pinned memory is real, device memory is refused ----

enum { MOST_PINNED = 1 << 14 };
static struct {
  const char* begin;
  size_t size;
} pinned[MOST_PINNED];
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;

// Returns the place of the pinned block that holds a pointer (NULL: of a free place), or MOST_PINNED; call it locked.
static int pinned_at(const char* pointer) {
  int at = 0;
  while (at < MOST_PINNED &&
         !(pointer ? pinned[at].begin && pointer >= pinned[at].begin && pointer < pinned[at].begin + pinned[at].size
                   : !pinned[at].begin))
    ++at;
  return at;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned flags) {
  (void)flags;
  *pointer = malloc(size ? size : 1);
  pthread_mutex_lock(&pinned_lock);
  int at = pinned_at(NULL);
  if (*pointer && at < MOST_PINNED) pinned[at].begin = *pointer, pinned[at].size = size ? size : 1;
  pthread_mutex_unlock(&pinned_lock);
  return *pointer && at < MOST_PINNED ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void* pointer) {
  pthread_mutex_lock(&pinned_lock);
  int at = pinned_at(pointer);
  if (pointer && at < MOST_PINNED) pinned[at].begin = NULL;
  pthread_mutex_unlock(&pinned_lock);
  return free(pointer), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  pthread_mutex_lock(&pinned_lock);
  int is_pinned = pointer && pinned_at(pointer) < MOST_PINNED;
  pthread_mutex_unlock(&pinned_lock);
  attributes->type = is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) { return (void)pointer, cudaSuccess; }
cudaError_t cudaMalloc(void** pointer, size_t size) { return (void)pointer, (void)size, refused("cudaMalloc"); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return (void)to, (void)from, (void)size, (void)kind, (void)stream, refused("cudaMemcpyAsync");
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  return (void)to, (void)from, (void)size, (void)kind, refused("cudaMemcpy");
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  return (void)to, (void)value, (void)size, (void)stream, refused("cudaMemsetAsync");
}
cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return (void)f, (void)grid, (void)block, (void)args, (void)shared, (void)stream, refused("cudaLaunchKernel");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* f, void** args) {
  return (void)config, (void)f, (void)args, refused("cudaLaunchKernelExC");
}

// ---- The rest that torch asks for while it starts ----

cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaErrorUnknown"; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "refused by fake CUDA"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** f, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
  (void)symbol, (void)version, (void)flags;
  *f = NULL;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void* value) {
  return (void)device, (void)attribute, (void)value, cudaSuccess;
}
cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void* value) {
  return (void)device, (void)attribute, *(unsigned long long*)value = 0, cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return (void)device, *pool = (cudaMemPool_t)new_handle(), cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value) {
  return (void)pool, (void)attribute, (void)value, cudaSuccess;
}

// ---- The driver's names that torch looks up in libcuda.so.1 ----

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int* version) { return *version = CUDART_VERSION, 0; }
int cuDeviceGetCount(int* count) { return *count = setting("FAKE_CUDA_DEVICES", 1), 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return (void)device, *flags = 0, *active = 1, 0;
}
int cuGetErrorString(int error, const char** text) { return (void)error, *text = "refused by fake CUDA", 0; }
