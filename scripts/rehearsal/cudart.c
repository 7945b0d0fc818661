/* libcudart without a GPU, to be preloaded: what torch asks of the CUDA runtime before and between
 * kernels is answered, nothing is computed.
 *
 * Answered are the functions that torch calls while a program runs on fake tensors: what devices
 * there are (eight H100s), streams and events (numbers, always done), memory (the host's, so that
 * the few real tensors that torch makes, such as torch.tensor's, hold what was copied into them).
 * Launches are dropped. Every other function is the real library's, which finds no driver and says
 * so: a new release of torch that needs one more fails loudly.
 *
 * Waits for the device call back: the rehearsal counts them with the line of Python that waits.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 8, SM_COUNT = 132, SHARED_OPTIN = 227 * 1024, ALIGNMENT = 512 };
static const size_t MEMORY = 80ull << 30;

static __thread int current_device = 0;
static void (*on_wait)(const char *) = NULL;

/* Called by the rehearsal: `callback` gets the name of each function that waits for the device. */
void rehearsal_on_wait(void (*callback)(const char *)) { on_wait = callback; }

static cudaError_t waited(const char *name) {
    if (on_wait) on_wait(name);
    return cudaSuccess;
}

/* --- devices --- */

cudaError_t cudaGetDeviceCount(int *count) { *count = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

/* NVIDIA's data sheet of the H100 SXM, and the CUDA programming guide's table for capability 9.0. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H100 80GB HBM3");
    found->totalGlobalMem = MEMORY;
    found->major = 9;
    found->minor = 0;
    found->multiProcessorCount = SM_COUNT;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->sharedMemPerBlock = 48 * 1024;
    found->sharedMemPerBlockOptin = SHARED_OPTIN;
    found->sharedMemPerMultiprocessor = 228 * 1024;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->maxThreadsPerMultiProcessor = 2048;
    found->l2CacheSize = 50 << 20;
    found->textureAlignment = ALIGNMENT;
    found->pciBusID = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = 0;
    if (attribute == cudaDevAttrComputeCapabilityMajor) *value = 9;
    if (attribute == cudaDevAttrMultiProcessorCount) *value = SM_COUNT;
    if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = SHARED_OPTIN;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

/* --- streams and events: a number each, and never under way --- */

static size_t next_handle = ALIGNMENT;
#define NEW_HANDLE(kind) ((kind)__sync_fetch_and_add(&next_handle, ALIGNMENT))

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = NEW_HANDLE(cudaStream_t);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = NEW_HANDLE(cudaEvent_t);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = 1;
    return cudaSuccess;
}

/* --- waits --- */

cudaError_t cudaDeviceSynchronize(void) { return waited("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waited("cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waited("cudaEventSynchronize"); }

/* --- memory: the host's --- */

static cudaError_t allocate(void **memory, size_t bytes) {
    *memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) { return allocate(memory, bytes); }
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    return allocate(memory, bytes);
}
cudaError_t cudaFree(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *memory) { return cudaSuccess; }

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
    memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(memory, value, bytes);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = MEMORY - (1ull << 30);
    *total = MEMORY;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *memory) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = (void *)memory;
    return cudaSuccess;
}

/* --- kernels: none runs --- */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream) {
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                void **arguments) {
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                                   int size, size_t shared,
                                                                   unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}
