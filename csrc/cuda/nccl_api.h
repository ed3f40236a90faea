/*
 * NCCL as this backend uses it: declarations of its own, so that a build needs no
 * header of NCCL's, and the library's functions, found at run time.
 *
 * Names, numbers and layouts are those of NCCL 2.28, which later versions keep
 * (a test compares them with NVIDIA's header).  ncclConfig_t tells the library
 * which version of it this is; fields that a library does not know it ignores.
 */
#ifndef NCCL_API_H
#define NCCL_API_H

#include "cu.h"
#include "zc_status.h"

#include <limits.h>
#include <stddef.h>

#define NCCL_OLDEST 22700 /* the first for CUDA 13 */
#define NCCL_CONFIG_VERSION 22800
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_UNSET INT_MIN

typedef struct ncclComm *ncclComm_t;

typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

typedef enum { ncclSum = 0 } ncclRedOp_t;

typedef enum { ncclUint8 = 1, ncclUint64 = 5, ncclFloat32 = 7, ncclFloat64 = 8 } ncclDataType_t;

typedef struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking;
    int cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
} ncclConfig_t;

#define NCCL_MAP(X)                                                                                              \
    X(GetVersion, (int *version))                                                                                \
    X(GetUniqueId, (ncclUniqueId * id))                                                                          \
    X(CommInitRankConfig, (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config))       \
    X(CommFinalize, (ncclComm_t comm))                                                                           \
    X(CommDestroy, (ncclComm_t comm))                                                                            \
    X(CommAbort, (ncclComm_t comm))                                                                              \
    X(CommGetAsyncError, (ncclComm_t comm, ncclResult_t *result))                                                \
    X(GroupStart, (void))                                                                                        \
    X(GroupEnd, (void))                                                                                          \
    X(ReduceScatter, (const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,             \
                      ncclComm_t comm, cudaStream_t stream))                                                     \
    X(AllGather, (const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,                \
                  cudaStream_t stream))                                                                          \
    X(AllReduce, (const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,                 \
                  ncclComm_t comm, cudaStream_t stream))                                                         \
    X(Broadcast, (const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,      \
                  cudaStream_t stream))                                                                          \
    X(Send, (const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)) \
    X(Recv, (void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))

typedef struct nccl_api {
    int version; /* of the library, as 22809 */
#define X(name, arguments) ncclResult_t(*name) arguments;
    NCCL_MAP(X)
#undef X
    const char *(*GetErrorString)(ncclResult_t result);
    const char *(*GetLastError)(ncclComm_t comm);
} nccl_api;

/*
 * The library, looked for once per process: the file that the environment's
 * ZERO_C_NCCL names; else the one that is loaded already (torch's, so that there
 * are not two), `wheel` (the path of the nvidia-nccl wheel's, or NULL), the
 * system's.  ZC_ESTATE says what was found and what to install.
 */
zc_status nccl_open(const char *wheel, const nccl_api **out);

#endif
