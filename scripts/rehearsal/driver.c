/* libcuda.so.1 without a driver: torch and Triton look for the file, count devices by it and ask
 * whether there is a context. What is not here does not exist, and whoever needs it fails. */
#define _GNU_SOURCE
#include <dlfcn.h>

typedef int Result; /* CUDA_SUCCESS is 0. */
enum { NOT_FOUND = 500, VERSION = 13000, DEVICES = 8 };

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
Result cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
Result cuDeviceGet(int *device, int index) { *device = index; return 0; }

Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

Result cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }

Result cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags,
                           void *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? 0 : NOT_FOUND;
}

Result cuGetErrorString(int error, const char **text) { *text = "no driver (rehearsal)"; return 0; }
