/*
 * Declarations between ranks that are threads: ranks that do the same are never
 * disturbed, no difference is missed, and the sentence names the pair.  Under the
 * thread sanitizer this checks the reading without locks of mem_declare.c.
 */
#include "comm.h"
#include "together.h"

#include <pthread.h>

#define RANKS_MAX 8

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define TRIALS 30
#define MANY 3000
#else
#define TRIALS 300
#define MANY 100000
#endif

typedef struct rank_state {
    zc_comm *comm;
    size_t rank, ranks;
    void (*body)(struct rank_state *);
    pthread_barrier_t *meeting; /* beside the communicator */
    uint64_t odd;               /* this rank's declaration of this number differs; 0: none */
    uint64_t random;
} rank_state;

static void *run_rank(void *argument)
{
    rank_state *s = argument;
    s->body(s);
    comm_close(s->comm);
    return NULL;
}

/* body on `ranks` threads; the last rank's `odd` is as given. */
static void with_ranks(size_t ranks, uint64_t odd, uint64_t seed, void (*body)(rank_state *))
{
    zc_comm *comms[RANKS_MAX];
    rank_state states[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    pthread_barrier_t meeting;
    pthread_barrier_init(&meeting, NULL, (unsigned)ranks);
    CHECK_OK(local_comm_create(ranks, 20 * SECOND, comms));
    for (size_t r = 0; r < ranks; r++) {
        states[r] = (rank_state){.comm = comms[r], .rank = r, .ranks = ranks, .body = body, .meeting = &meeting,
                                 .odd = r == ranks - 1 ? odd : 0, .random = 77 * seed + r};
        pthread_create(&threads[r], NULL, run_rank, &states[r]);
    }
    for (size_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&meeting);
}

static void with_all_sizes(uint64_t odd, void (*body)(rank_state *))
{
    for (size_t ranks = 1; ranks <= RANKS_MAX; ranks++)
        with_ranks(ranks, odd, ranks, body);
}

static void meet(rank_state *s)
{
    pthread_barrier_wait(s->meeting);
}

/* Declaration `number` of a line, as all do it, or as the odd rank does. */
static zc_status declare_as(rank_state *s, uint32_t line, uint64_t number, uint64_t odd)
{
    char what[COMM_WHAT_BYTES];
    snprintf(what, sizeof what, number == odd ? "other thing %llu" : "thing %llu", (unsigned long long)number);
    return comm_declare(s->comm, line, 1000 * number + (number == odd), what);
}

static zc_status declare_up_to(rank_state *s, uint32_t line, uint64_t first, uint64_t last)
{
    for (uint64_t number = first; number <= last; number++)
        ZC_TRY(declare_as(s, line, number, s->odd));
    return ZC_OK;
}

/* ---- the same on all ranks ------------------------------------------------ */

static void same_body(rank_state *s)
{
    char text[64], all[256] = "";
    for (size_t q = 0, used = 0; q < s->ranks; q++)
        used += (size_t)snprintf(all + used, sizeof all - used, "%s%zu", q ? ", " : "", q);
    for (uint64_t number = 1; number <= MANY / 10; number++)
        for (uint32_t line = 0; line < COMM_LINES; line++) {
            CHECK_OK(declare_as(s, line, number, 0));
            if (testing_random(&s->random) % 500 == 0)
                nanosleep(&(struct timespec){0, 100000}, NULL);
        }
    CHECK_OK(comm_barrier(s->comm));
    for (uint32_t line = 0; line < COMM_LINES; line++) {
        CHECK_EQ(comm_behind(s->comm, line, MANY / 10, text, sizeof text), 0);
        CHECK_EQ(text[0], 0);
        CHECK_EQ(comm_behind(s->comm, line, MANY / 10 + 1, text, sizeof text), s->ranks);
        CHECK(strcmp(text, all) == 0);
    }
    CHECK_OK(comm_barrier(s->comm));
}

static void test_same_order(void)
{
    with_all_sizes(0, same_body);
}

/* Every ring goes round many times while the others read. */
static void wrap_body(rank_state *s)
{
    CHECK_OK(declare_up_to(s, 1, 1, MANY));
    CHECK_OK(comm_barrier(s->comm));
}

static void test_wrap_around(void)
{
    with_ranks(2, 0, 1, wrap_body);
    with_ranks(4, 0, 1, wrap_body);
}

/* `what` is for people: only details are compared. */
static void words_body(rank_state *s)
{
    CHECK_OK(comm_declare(s->comm, 0, 7, s->rank ? "seven" : "sept"));
    CHECK_OK(comm_declare(s->comm, 0, 8, NULL));
    CHECK_OK(comm_barrier(s->comm));
}

static void test_words_are_not_compared(void)
{
    with_all_sizes(0, words_body);
}

/* ---- differences ----------------------------------------------------------- */

/* Whatever the schedule: nobody gets over the barrier, and every later call fails. */
static void different_body(rank_state *s)
{
    char thing[64], other[32] = "";
    uint64_t pause = testing_random(&s->random) % 200000;
    nanosleep(&(struct timespec){0, (long)pause}, NULL);
    meet(s);
    zc_status status = declare_up_to(s, 2, 1, 100);
    if (status == ZC_OK)
        status = comm_barrier(s->comm);
    CHECK_EQ(status, ZC_EMISMATCH);
    meet(s); /* with the odd rank's number, which all know now */
    CHECK_EQ(declare_as(s, 0, 1, 0), ZC_EMISMATCH);
    CHECK(text_has("other thing "));
    if (!strstr(zc_last_error(), "other thing "))
        return;
    CHECK(sscanf(strstr(zc_last_error(), "other thing "), "%31[a-z ]%31[0-9]", thing, other) == 2);
    snprintf(thing, sizeof thing, "\"thing %s\"", other);
    CHECK(text_has(thing) && text_has("ranks do different things: rank ") && text_has("where rank ") && text_has("same order"));
    snprintf(thing, sizeof thing, "(number %s of each)", other);
    CHECK(text_has(thing));
    CHECK(s->odd == 0 || atoll(other) == (long long)s->odd);
    CHECK_EQ(comm_barrier(s->comm), ZC_EMISMATCH);
}

static void test_no_difference_is_missed(void)
{
    for (uint64_t seed = 1; seed <= TRIALS; seed++) {
        uint64_t state = seed;
        with_ranks(2 + seed % 7, 40 + testing_random(&state) % 61, seed, different_body);
    }
}

/* One of another line is no difference. */
static void swapped_body(rank_state *s)
{
    int odd = s->rank == s->ranks - 1;
    CHECK_OK(comm_declare(s->comm, odd ? 1 : 0, 5, "five"));
    CHECK_OK(comm_declare(s->comm, odd ? 0 : 1, 5, "five"));
    meet(s);
    zc_status status = comm_declare(s->comm, 0, odd ? 6 : 7, odd ? "six" : "seven");
    if (status == ZC_OK)
        status = comm_declare(s->comm, 0, odd ? 7 : 6, odd ? "seven" : "six");
    if (status == ZC_OK)
        status = comm_barrier(s->comm);
    CHECK_EQ(status, s->ranks == 1 ? ZC_OK : ZC_EMISMATCH);
    CHECK(s->ranks == 1 || (text_has("\"six\"") && text_has("\"seven\"") && text_has("(number 2 of each)")));
}

static void test_another_order(void)
{
    with_all_sizes(0, swapped_body);
}

static void arguments_body(rank_state *s)
{
    char text[8] = "old";
    CHECK_EQ(comm_declare(s->comm, COMM_LINES, 1, "x"), ZC_EINVAL);
    CHECK(text_has("line 3; there are lines 0 to 2"));
    CHECK_EQ(comm_behind(s->comm, COMM_LINES, 1, text, sizeof text), 0);
    CHECK_EQ(text[0], 0);
    char longer[COMM_WHAT_BYTES + 20];
    memset(longer, 'y', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    zc_status status = comm_declare(s->comm, 0, s->rank + 1, longer);
    if (status == ZC_OK)
        status = comm_barrier(s->comm);
    CHECK_EQ(status, ZC_EMISMATCH);
    longer[COMM_WHAT_BYTES - 1] = '\0';
    CHECK(text_has(longer) && text_has("both come to \"yyy") && text_has("y\" (number 1 of each) but with different arguments"));
}

static void test_arguments(void)
{
    with_ranks(2, 0, 1, arguments_body);
}

/* ---- ranks far apart --------------------------------------------------------- */

#define AHEAD 1000u

/* Rank 0 is far ahead, and its number `odd` is another one than rank 1's. */
static void ahead_body(rank_state *s)
{
    char text[32], number[64];
    uint64_t first = s->odd + COMM_DECLARED > AHEAD ? s->odd : AHEAD - COMM_DECLARED + 1; /* where it is found */
    if (s->rank == 0)
        CHECK_OK(declare_up_to(s, 0, 1, AHEAD));
    meet(s);
    if (s->rank == 1) {
        CHECK_EQ(comm_behind(s->comm, 0, AHEAD, text, sizeof text), 1);
        CHECK(strcmp(text, "1") == 0);
        CHECK_OK(declare_up_to(s, 0, 1, first - 1));
        CHECK_EQ(declare_as(s, 0, first, s->odd), ZC_EMISMATCH);
        snprintf(number, sizeof number, first == s->odd ? "(number %llu of each)" : "before their number %llu",
                 (unsigned long long)first);
        CHECK(text_has(number) && (first != s->odd || text_has("\"other thing ")));
    }
    meet(s);
    CHECK_EQ(comm_barrier(s->comm), ZC_EMISMATCH);
}

static void test_far_ahead(void)
{
    static const uint64_t odd[] = {AHEAD, AHEAD - 1, AHEAD - COMM_DECLARED + 1, AHEAD - COMM_DECLARED, 100, 1};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        with_ranks(2, odd[i], 1, ahead_body);
}

/* The one that is behind differs, and the one ahead finds it with its own ring, or the other one when it goes on. */
static void behind_body(rank_state *s)
{
    if (s->rank == 1) {
        CHECK_OK(declare_up_to(s, 0, 1, s->odd - 1));
        CHECK_OK(declare_as(s, 0, s->odd, s->odd));
    }
    meet(s);
    if (s->rank == 0) {
        CHECK_OK(declare_up_to(s, 0, 1, s->odd ? s->odd - 1 : 29));
        CHECK_EQ(declare_as(s, 0, 30, 0), ZC_EMISMATCH);
        CHECK(text_has("rank 0 comes to \"thing 30\" where rank 1 comes to \"other thing 30\""));
    }
    meet(s);
    CHECK_EQ(comm_barrier(s->comm), ZC_EMISMATCH);
}

static void test_who_comes_second_finds_it(void)
{
    with_ranks(2, 30, 1, behind_body);
}

/* ---- groups, threads, ranks that wait --------------------------------------------- */

static void split_body(rank_state *s)
{
    zc_comm *part;
    char text[16];
    CHECK_OK(comm_split(s->comm, (int64_t)(s->rank % 2), &part));
    CHECK_OK(comm_declare(part, 0, s->rank % 2, "one for each half"));
    CHECK_OK(comm_declare(s->comm, 0, 9, "one for all"));
    CHECK_OK(comm_barrier(part));
    CHECK_EQ(comm_behind(part, 0, 1, text, sizeof text), 0);
    CHECK_OK(comm_barrier(part));
    if (s->rank == 1)
        CHECK_OK(comm_declare(part, 0, 4, "four"));
    meet(s);
    if (s->rank == 3) {
        CHECK_EQ(comm_behind(part, 0, 2, text, sizeof text), 1);
        CHECK(strcmp(text, "3") == 0); /* its number in the first communicator */
        CHECK_EQ(comm_declare(part, 0, 5, "five"), ZC_EMISMATCH);
        CHECK(text_has("rank 3 comes to \"five\" where rank 1 comes to \"four\""));
    }
    meet(s);
    CHECK_EQ(comm_barrier(part), s->rank % 2 ? ZC_EMISMATCH : ZC_OK);
    CHECK_OK(comm_declare(s->comm, 0, 10, "the whole goes on"));
    CHECK_OK(comm_barrier(s->comm));
    comm_close(part);
}

static void test_split(void)
{
    with_ranks(4, 0, 1, split_body);
}

static void *declare_often(void *argument)
{
    for (int k = 0; k < MANY / 100; k++)
        CHECK_OK(comm_declare(argument, 2, 3, "the same by every thread"));
    return NULL;
}

static void threads_body(rank_state *s)
{
    enum { THREADS = 3 };
    pthread_t threads[THREADS];
    char text[32];
    for (int t = 0; t < THREADS; t++)
        pthread_create(&threads[t], NULL, declare_often, s->comm);
    for (int t = 0; t < THREADS; t++)
        pthread_join(threads[t], NULL);
    CHECK_OK(comm_barrier(s->comm));
    CHECK_EQ(comm_behind(s->comm, 2, THREADS * (MANY / 100), text, sizeof text), 0);
    CHECK_EQ(comm_behind(s->comm, 2, THREADS * (MANY / 100) + 1, text, sizeof text), s->ranks);
    CHECK_OK(comm_barrier(s->comm));
}

static void test_several_threads_a_rank(void)
{
    with_ranks(2, 0, 1, threads_body);
    with_ranks(3, 0, 1, threads_body);
}

static void waiting_body(rank_state *s)
{
    comm_channel *channel;
    uint64_t record = 1, records[RANKS_MAX];
    CHECK_OK(comm_channel_open(s->comm, "waiting", 1, &channel));
    meet(s);
    zc_status status = s->rank == 0 ? comm_exchange(channel, 0, "record", &record, records, sizeof record)
                                    : comm_declare(s->comm, 0, s->rank, "its own number");
    /* not in a call that waits for rank 0, which waits: that is another mismatch */
    for (int turn = 0; turn < 20000 && status == ZC_OK; turn++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        status = comm_watch(s->comm, "a test");
    }
    CHECK_EQ(status, ZC_EMISMATCH);
    CHECK(text_has("\"its own number\""));
    comm_channel_close(channel);
}

static void test_a_waiting_rank_hears_of_it(void)
{
    for (uint64_t seed = 1; seed <= 10; seed++)
        with_ranks(3, 0, seed, waiting_body);
}

/* ---- cost ---------------------------------------------------------------------------- */

static void bench_body(rank_state *s)
{
    CHECK_OK(comm_barrier(s->comm));
    uint64_t start_ns = now_ns();
    for (int k = 0; k < 1000000; k++)
        CHECK_OK(comm_declare(s->comm, 0, 1, "the same"));
    if (s->rank == 0)
        printf("%zu threads: %.3f us a declaration\n", s->ranks, (double)(now_ns() - start_ns) * 1e-9);
    CHECK_OK(comm_barrier(s->comm));
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        with_ranks(1, 0, 1, bench_body);
        with_ranks(2, 0, 1, bench_body);
        DONE();
    }
    RUN(test_same_order);
    RUN(test_wrap_around);
    RUN(test_words_are_not_compared);
    RUN(test_no_difference_is_missed);
    RUN(test_another_order);
    RUN(test_arguments);
    RUN(test_far_ahead);
    RUN(test_who_comes_second_finds_it);
    RUN(test_split);
    RUN(test_several_threads_a_rank);
    RUN(test_a_waiting_rank_hears_of_it);
    DONE();
}
