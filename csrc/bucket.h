/*
 * Between bucket.c (buckets are posted and reduced) and bucket_take.c (gradients
 * come in).
 */
#ifndef BUCKET_H
#define BUCKET_H

#include "engine.h"

/* Posts what is complete and may go now; bucket b of the space is the news. */
zc_status bucket_post_ready(zc_engine *engine, engine_space *space, size_t b);

/* Takes note of reductions that are over, from the lowest bucket that is not DONE on. */
zc_status bucket_advance_low(zc_engine *engine, engine_space *space);

/* Makes the stream wait for the lowest bucket that is not DONE, which is then. */
zc_status bucket_wait_low(zc_engine *engine, engine_space *space);

/* A parameter's part of bucket b: its gradient (zeros if NULL), and zeros for what pads it. */
zc_status bucket_fill_part(zc_engine *engine, engine_space *space, size_t b, const engine_param *param,
                           const char *grad);

/* A held gradient is not needed any more. */
zc_status bucket_let_go(zc_engine *engine, engine_space *space, engine_param *param);

/* All of its gradient has been copied or lent. */
static inline int bucket_delivered(const engine_space *space, const engine_param *param)
{
    return param->next_bucket > partition_bucket_of(&space->plan, param->extent - 1);
}

/* At stage 1 every bucket has a window of its own. */
static inline int bucket_has_room(const zc_engine *engine, const engine_space *space, size_t b)
{
    return engine->config.stage == 1 || b < space->low + space->slots;
}

#endif
