/*
 * Places at which a rank may die, be stopped or give up, for tests only.
 *
 * What a rank does alone its peers cannot see.  What they can see is what it stores
 * in memory that they map and what it sends, so between two of these it is the same
 * to them where it stopped.  A point stands before and after each of them, and in the
 * middle of what takes long.  A build with ZC_POINTS defined calls zc_point(), which
 * the test defines, at each; in every other build a point is nothing.
 */
#ifndef ZC_POINT_H
#define ZC_POINT_H

#ifdef ZC_POINTS
void zc_point(const char *name);
#define ZC_POINT(name) zc_point(name)
#else
#define ZC_POINT(name) ((void)0)
#endif

#endif
