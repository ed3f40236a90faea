/*
 * The binary layout of DLPack 1.x, by which tensors cross from one library to
 * another, declared for our own use.
 *
 * A producer hands out a PyCapsule named "dltensor" (before version 1.0) or
 * "dltensor_versioned".  Whoever takes what is in it renames the capsule to
 * "used_..." and from then on owns the managed tensor, which is given back by
 * its deleter, once, from any thread.  Of a versioned tensor only the members
 * before `tensor` keep their place when the major version changes, so that a
 * consumer can always call the deleter.
 *
 * The exchange table (1.3) does the same by C function pointers and is found in
 * the capsule `__dlpack_c_exchange_api__` of a tensor type.
 */
#ifndef DLPACK_ABI_H
#define DLPACK_ABI_H

#include <stdint.h>

#define DL_MAJOR 1u
#define DL_MINOR 1u /* newest minor version whose meaning we rely on */

#define DL_NAME "dltensor"
#define DL_NAME_USED "used_dltensor"
#define DL_NAME_VERSIONED "dltensor_versioned"
#define DL_NAME_VERSIONED_USED "used_dltensor_versioned"
#define DL_NAME_EXCHANGE "dlpack_exchange_api"

/* Device types of memory that the CPU can address. */
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_PINNED = 3, DL_CUDA_MANAGED = 13 };

/* Type codes; an element has `bits` bits times `lanes`. */
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

typedef struct dl_version {
    uint32_t major, minor;
} dl_version;

typedef struct dl_device {
    int32_t type, index;
} dl_device;

typedef struct dl_type {
    uint8_t code, bits;
    uint16_t lanes;
} dl_type;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t dims;
    dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: row-major (before 1.2) */
    uint64_t offset_bytes;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self); /* may be NULL */
} dl_managed;

#define DL_FLAG_READ_ONLY 1u
#define DL_FLAG_COPIED 2u

typedef struct dl_managed_versioned {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_managed_versioned *self); /* may be NULL */
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

typedef struct dl_exchange_header {
    dl_version version;
    struct dl_exchange_header *older; /* the table of an earlier major version, or NULL */
} dl_exchange_header;

/* Functions return 0, or -1 with a Python error set. "no_sync": streams are the caller's affair. */
typedef struct dl_exchange {
    dl_exchange_header header;
    int (*allocate)(dl_tensor *prototype, dl_managed_versioned **out, void *error_context,
                    void (*set_error)(void *error_context, const char *kind, const char *message));
    int (*managed_from_object_no_sync)(void *object, dl_managed_versioned **out);
    int (*object_from_managed_no_sync)(dl_managed_versioned *managed, void **out_object);
    /* Fills *out without a reference: good while the object lives. May be NULL. */
    int (*view_object_no_sync)(void *object, dl_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_index, void **out_stream);
} dl_exchange;

#endif
