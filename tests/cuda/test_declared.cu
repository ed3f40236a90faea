/*
 * Kernels that do not keep to what they declare are found, and those that do are
 * not: in a build that watches kernels (emu_watch.cc), as this one is.
 */
#include "emulated.h"

#define ELEMS 100
#define BYTES (ELEMS * sizeof(float))

struct pair {
    double first, second;
    float more[6];
};

__global__ void add_kernel(float *to, const float *from, size_t count)
{
    __shared__ float box[32];
    for (size_t i = threadIdx.x; i < count; i += blockDim.x) {
        box[threadIdx.x] = from[i];
        to[i] += box[threadIdx.x];
    }
}

/* Its first and last elements are the only ones. */
__global__ void ends_kernel(float *to, const float *from, size_t count)
{
    to[0] = from[0];
    to[count - 1] = from[count - 1];
}

__global__ void some_kernel(float *to, size_t at, size_t count)
{
    for (size_t i = at; i < count; i++)
        to[i] = 1;
}

__global__ void count_kernel(unsigned *to)
{
    atomicAdd(to, 1u);
}

__global__ void clear_kernel(pair *to, size_t bytes)
{
    memset(to, 0, bytes);
}

__global__ void move_kernel(pair *to, const pair *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

__global__ void assign_kernel(pair *to, const pair *from)
{
    *to = *from;
}

static cudaStream_t stream;
static float *a, *b; /* 2 * ELEMS each */

static void begin(void)
{
    static float zeros[2 * ELEMS];
    emu_reset(1, 0, 1);
    stream = new_stream();
    a = (float *)device_memory(sizeof zeros);
    b = (float *)device_memory(sizeof zeros);
    emu_poke(a, zeros, sizeof zeros);
    emu_poke(b, zeros, sizeof zeros);
}

static void add_declaring(size_t to_bytes, size_t from_bytes)
{
    begin();
    CHECK_EQ(CU_LAUNCH(add_kernel, 1, 32, stream, CU_READS(b, from_bytes) CU_WRITES(a, to_bytes), a, b, ELEMS),
             cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

static void what_is_declared_is_silent(void)
{
    add_declaring(BYTES, BYTES);
    CHECK_CLEAN();
    begin();
    CHECK_EQ(CU_LAUNCH(ends_kernel, 1, 1, stream, CU_READS(b, BYTES) CU_WRITES(a, BYTES), a, b, ELEMS), cudaSuccess);
    CHECK_EQ(CU_LAUNCH(add_kernel, 1, 32, stream, CU_READS(a, BYTES) CU_WRITES(a, BYTES), a, a, ELEMS), cudaSuccess);
    CHECK_EQ(CU_LAUNCH(count_kernel, 3, 32, stream, CU_WRITES(a + 1, 4), (unsigned *)(a + 1)), cudaSuccess);
    CHECK_EQ(CU_LAUNCH(assign_kernel, 1, 1, stream, CU_READS(b, sizeof(pair)) CU_WRITES(a, sizeof(pair)), (pair *)a,
                       (pair *)b), cudaSuccess);
    CHECK_EQ(CU_LAUNCH(move_kernel, 1, 1, stream, CU_READS(b, 30) CU_WRITES(a, 30), (pair *)a, (pair *)b, 30),
             cudaSuccess);
    CHECK_EQ(CU_LAUNCH(clear_kernel, 1, 1, stream, CU_READS(b, 0) CU_WRITES(a, 30), (pair *)a, 30), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_CLEAN();
}

static void too_little_is_found(void)
{
    add_declaring(BYTES, BYTES - 4);
    CHECK_FOUND("undeclared: add_kernel");
    CHECK_FOUND("reads 4 bytes at offset 396 of 800");
    CHECK_EQ(emu_findings(NULL, 0), 1);
    add_declaring(BYTES - 4, BYTES);
    CHECK_FOUND("writes 4 bytes at offset 396 of 800");
    add_declaring(BYTES, 0);
    CHECK_FOUND("reads 4 bytes at offset"); /* whichever thread came first */
    begin();
    CHECK_EQ(CU_LAUNCH(add_kernel, 1, 32, stream, CU_READS(b, BYTES) CU_READS(a, BYTES), a, b, ELEMS), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_FOUND("writes 4 bytes at offset");
}

static void too_much_is_found(void)
{
    add_declaring(BYTES, BYTES + 4);
    CHECK_FOUND("declared too much: add_kernel");
    CHECK_FOUND("range 1: its last byte of 404 is not read");
    CHECK_EQ(emu_findings(NULL, 0), 1);
    add_declaring(BYTES + 1, BYTES);
    CHECK_FOUND("range 2: its last byte of 401 is not written");
    begin();
    CHECK_EQ(CU_LAUNCH(some_kernel, 1, 1, stream, CU_WRITES(a, BYTES), a, 1, ELEMS), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_FOUND("range 1: its first byte of 400 is not written");
    begin(); /* read only: that is another thing than written */
    CHECK_EQ(CU_LAUNCH(add_kernel, 1, 32, stream, CU_WRITES(b, BYTES) CU_WRITES(a, BYTES), a, b, ELEMS), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_FOUND("range 1: its first byte of 400 is not written");
}

/* Accesses of structs and of the library's functions are seen, too. */
static void wide_accesses_are_seen(void)
{
    begin();
    CHECK_EQ(CU_LAUNCH(assign_kernel, 1, 1, stream, CU_READS(b, sizeof(pair)) CU_WRITES(a, sizeof(pair) - 4), (pair *)a,
                       (pair *)b), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_FOUND("writes");
    begin();
    CHECK_EQ(CU_LAUNCH(move_kernel, 1, 1, stream, CU_READS(b, 29) CU_WRITES(a, 30), (pair *)a, (pair *)b, 30),
             cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_FOUND("reads 30 bytes at offset 0 of 800");
    begin();
    CHECK_EQ(CU_LAUNCH(clear_kernel, 1, 1, stream, CU_WRITES(a, 31), (pair *)a, 32), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_FOUND("writes 32 bytes at offset 0 of 800");
}

static void touch_some(size_t at, size_t count)
{
    begin();
    CHECK_EQ(CU_LAUNCH(some_kernel, 1, 1, stream, CU_MAY_WRITE(a, BYTES), a, at, count), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

/* What the data decide on has to happen once in a program, at either end. */
static void what_may_be_touched_is_once(void)
{
    CHECK_EQ(emu_unreached(report, sizeof report), 0);
    touch_some(2, 50);
    CHECK_CLEAN();
    CHECK_EQ(emu_unreached(report, sizeof report), 1);
    CHECK(strstr(report, "some_kernel at test_declared.cu") && strstr(report, "range 1: its first byte is never"));
    touch_some(0, 50);
    CHECK_EQ(emu_unreached(report, sizeof report), 1);
    CHECK(strstr(report, "range 1: its last byte is never"));
    touch_some(99, 100);
    CHECK_CLEAN();
    CHECK_EQ(emu_unreached(report, sizeof report), 0);
    touch_some(99, 101);
    CHECK_FOUND("writes 4 bytes at offset 400 of 800");
}

int main(void)
{
    RUN(what_is_declared_is_silent);
    RUN(too_little_is_found);
    RUN(too_much_is_found);
    RUN(wide_accesses_are_seen);
    RUN(what_may_be_touched_is_once);
    emu_reset(0, 0, 0);
    DONE();
}
