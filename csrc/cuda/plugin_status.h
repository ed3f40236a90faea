/* Whose table the plugin's zc_status.h stands on. */
#ifndef PLUGIN_STATUS_H
#define PLUGIN_STATUS_H

#include "cuda_plugin.h"

/* Before anything else of the plugin is called. */
void plugin_status_use(const zc_cuda_host *host);

#endif
