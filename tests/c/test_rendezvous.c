/*
 * How ranks of a job on one host meet: who is missing, who is refused, and
 * that strangers at the door cannot hold up the others.
 */
#define _GNU_SOURCE
#include "comm.h"
#include "shm_rendezvous.h"
#include "together.h"

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RANKS_MAX 70

static char job[96];
static unsigned jobs_made;

static void new_job(void)
{
    snprintf(job, sizeof job, "meet-%d-%u", (int)getpid(), ++jobs_made);
}

/* One rank in a process of its own: opens, and checks what came of it. */
typedef struct rank_case {
    size_t rank, ranks;
    const char *token;
    unsigned delay_us;
    double timeout_s;
    zc_status want;
    const char *parts[3]; /* of the sentence */
} rank_case;

static int run_case(const rank_case *c)
{
    zc_comm *comm = NULL;
    size_t fds = count_fds();
    pause_us(c->delay_us);
    shm_comm_config config = {.rank = c->rank, .ranks = c->ranks, .job = job, .token = c->token,
                              .start_timeout_ns = (uint64_t)(c->timeout_s * SECOND), .timeout_ns = 10 * SECOND};
    uint64_t start = now_ns();
    zc_status status = shm_comm_open(&config, &comm);
    CHECK_EQ(status, c->want);
    if (status != c->want)
        fprintf(stderr, "rank %zu: %s\n", c->rank, status == ZC_OK ? "opened" : zc_last_error());
    CHECK(now_ns() - start < (uint64_t)((c->timeout_s + 2) * SECOND));
    for (int p = 0; p < 3 && c->parts[p] && status != ZC_OK; p++)
        CHECK(text_has(c->parts[p]));
    if (status == ZC_OK)
        CHECK_OK(comm_barrier(comm));
    comm_close(comm);
    CHECK_EQ(count_fds(), fds);
    return testing_failures ? 1 : 0;
}

static pid_t start_case(const rank_case *c)
{
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(30);
        testing_failures = 0;
        _exit(run_case(c));
    }
    return pid;
}

static void finish(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_EQ(status, 0);
}

static void run_cases(const rank_case *cases, size_t count)
{
    pid_t pids[RANKS_MAX];
    for (size_t i = 0; i < count; i++)
        pids[i] = start_case(&cases[i]);
    for (size_t i = 0; i < count; i++)
        finish(pids[i]);
}

/* ---- ranks that come, and those that do not -------------------------------- */

static void test_any_order(void)
{
    rank_case cases[] = {{0, 3, NULL, 200000, 10, ZC_OK, {0}}, {1, 3, NULL, 0, 10, ZC_OK, {0}},
                         {2, 3, NULL, 100000, 10, ZC_OK, {0}}};
    new_job();
    run_cases(cases, 3);
    cases[0].delay_us = 0;
    run_cases(cases, 3);
}

static void test_many_ranks(void)
{
    rank_case cases[RANKS_MAX];
    new_job();
    for (size_t r = 0; r < RANKS_MAX; r++)
        cases[r] = (rank_case){r, RANKS_MAX, "t", 0, 20, ZC_OK, {0}};
    run_cases(cases, RANKS_MAX);
}

static void test_missing_rank(void)
{
    rank_case cases[] = {{0, 4, NULL, 0, 0.6, ZC_ETIMEOUT, {"missing: 2", "3 ranks", NULL}},
                         {1, 4, NULL, 0, 0.6, ZC_ETIMEOUT, {"missing: 2", NULL}},
                         {3, 4, NULL, 0, 0.6, ZC_ETIMEOUT, {"missing: 2", NULL}}};
    cases[0].parts[1] = "1 of 4 ranks";
    new_job();
    run_cases(cases, 3);
    /* without rank 0 */
    rank_case alone = {1, 2, NULL, 0, 0.3, ZC_ETIMEOUT, {"missing: 0", "rank 1", NULL}};
    run_cases(&alone, 1);
}

/* ---- those who are refused -------------------------------------------------- */

static void test_wrong_token(void)
{
    rank_case cases[] = {{0, 2, "right", 0, 10, ZC_OK, {0}},
                         {1, 2, "wrong", 50000, 10, ZC_ECOMM, {"token", "ZERO_C_TOKEN", NULL}},
                         {1, 2, NULL, 50000, 10, ZC_ECOMM, {"token", NULL}},
                         {1, 2, "right and more", 50000, 10, ZC_ECOMM, {"token", NULL}},
                         {1, 2, "right", 400000, 10, ZC_OK, {0}}};
    new_job();
    run_cases(cases, 5);
}

static void test_wrong_rank_or_size(void)
{
    rank_case cases[] = {{0, 3, NULL, 0, 10, ZC_OK, {0}},
                         {1, 3, NULL, 0, 10, ZC_OK, {0}},
                         {1, 3, NULL, 150000, 10, ZC_ECOMM, {"rank 1", "joined already", NULL}},
                         {1, 4, NULL, 150000, 10, ZC_ECOMM, {"expects 3 ranks", "4", NULL}},
                         {2, 3, NULL, 500000, 10, ZC_OK, {0}}};
    new_job();
    run_cases(cases, 5);

    zc_comm *comm;
    shm_comm_config config = {.rank = 2, .ranks = 2, .job = job};
    CHECK_EQ(shm_comm_open(&config, &comm), ZC_EINVAL);
    char name[100];
    memset(name, 'x', sizeof name);
    name[81] = '\0';
    config = (shm_comm_config){.rank = 0, .ranks = 2, .job = name};
    CHECK_EQ(shm_comm_open(&config, &comm), ZC_EINVAL);
    name[80] = '\0'; /* the longest there may be fits */
    config.start_timeout_ns = SECOND / 10;
    CHECK_EQ(shm_comm_open(&config, &comm), ZC_ETIMEOUT);
}

static void test_two_jobs_of_one_name(void)
{
    rank_case cases[] = {{0, 2, NULL, 0, 10, ZC_OK, {0}},
                         {0, 2, NULL, 100000, 10, ZC_ECOMM, {"already being started", "ZERO_C_JOB", NULL}},
                         {1, 2, NULL, 1800000, 10, ZC_OK, {0}}};
    new_job();
    run_cases(cases, 3);
}

/* A rank that dies while it waits to be let in may be started again. */
static void test_rank_dies_and_comes_again(void)
{
    rank_case first = {0, 3, NULL, 0, 10, ZC_OK, {0}}, second = {1, 3, NULL, 0, 10, ZC_OK, {0}},
              third = {2, 3, NULL, 300000, 10, ZC_OK, {0}};
    new_job();
    pid_t zero = start_case(&first), one = start_case(&second);
    pause_us(100000);
    kill(one, SIGKILL);
    waitpid(one, NULL, 0);
    pid_t again = start_case(&second), two = start_case(&third);
    finish(zero);
    finish(again);
    finish(two);
}

/* One that is not is lost, whichever it is, long before the start timeout. */
static void test_rank_dies_and_is_missed(void)
{
    for (size_t dies = 0; dies < 2; dies++) {
        rank_case cases[2] = {{0, 3, NULL, 0, 10, ZC_EPEERLOST, {"rank 1 of job", "was lost", NULL}},
                              {1, 3, NULL, 0, 10, ZC_EPEERLOST, {"rank 0 of job", "was lost", NULL}}};
        pid_t pids[2];
        new_job();
        for (size_t r = 0; r < 2; r++)
            pids[r] = start_case(&cases[r]);
        pause_us(200000);
        kill(pids[dies], SIGKILL);
        waitpid(pids[dies], NULL, 0);
        uint64_t start_ns = now_ns();
        finish(pids[1 - dies]);
        CHECK(now_ns() - start_ns < SECOND);
    }
}

/* ---- strangers --------------------------------------------------------------- */

static int knock(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "zero_c/%u/%s", (unsigned)geteuid(), job);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address,
                           (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Silent, short, long and random packets, with descriptors nobody asked for; hundreds of them. */
static void test_garbage(void)
{
    rank_case first = {0, 2, "t", 0, 10, ZC_OK, {0}}, second = {1, 2, "t", 0, 5, ZC_OK, {0}};
    int silent[200], open_count = 0;
    uint64_t state = 1;
    new_job();
    pid_t zero = start_case(&first);
    pause_us(100000);
    for (int i = 0; i < 200; i++) {
        int fd = knock();
        if (fd >= 0)
            silent[open_count++] = fd;
        unsigned char packet[2000];
        for (size_t b = 0; b < sizeof packet; b++)
            packet[b] = (unsigned char)testing_random(&state);
        fd = knock();
        if (fd < 0)
            continue;
        size_t bytes = testing_random(&state) % sizeof packet;
        if (i % 4 == 0) { /* the right size and magic, garbage behind; and ten descriptors */
            uint64_t magic = 0x7a65726f5f633031ull;
            memcpy(packet, &magic, sizeof magic);
            bytes = 8 + 6 * 4 + 512;
            if (i % 8 == 0) {
                uint32_t rest[6] = {2, 1, 1, 2, 0, 1};
                memcpy(packet + 8, rest, sizeof rest);
                packet[32] = 't';
            }
        }
        char control[CMSG_SPACE(10 * sizeof(int))] = {0};
        struct iovec part = {packet, bytes};
        struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control};
        size_t some = (size_t)i % 11 ? 2 : 10;
        header.msg_controllen = CMSG_SPACE(some * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(some * sizeof(int));
        for (size_t f = 0; f < some; f++)
            memcpy(CMSG_DATA(rights) + f * sizeof(int), &fd, sizeof fd);
        sendmsg(fd, &header, MSG_NOSIGNAL);
        close(fd);
    }
    pid_t one = start_case(&second);
    finish(zero);
    finish(one);
    while (open_count)
        close(silent[--open_count]);
}

static int stop_soon(void *context)
{
    return now_ns() > *(uint64_t *)context;
}

static void test_interrupt(void)
{
    uint64_t end;
    zc_comm *comm;
    new_job();
    for (size_t rank = 0; rank < 2; rank++) {
        end = now_ns() + SECOND / 5;
        shm_comm_config config = {.rank = rank, .ranks = 2, .job = job, .start_timeout_ns = 10 * SECOND,
                                  .timeout_ns = SECOND, .interrupted = stop_soon, .interrupt_context = &end};
        size_t fds = count_fds();
        CHECK_EQ(shm_comm_open(&config, &comm), ZC_EINTERRUPT);
        CHECK(now_ns() < end + SECOND / 5);
        CHECK_EQ(count_fds(), fds);
    }
}

int main(void)
{
    RUN(test_any_order);
    RUN(test_many_ranks);
    RUN(test_missing_rank);
    RUN(test_wrong_token);
    RUN(test_wrong_rank_or_size);
    RUN(test_two_jobs_of_one_name);
    RUN(test_rank_dies_and_comes_again);
    RUN(test_rank_dies_and_is_missed);
    RUN(test_garbage);
    RUN(test_interrupt);
    DONE();
}
