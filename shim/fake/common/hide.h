/* hide.h - an exported symbol of this library that nobody is to find. */
#ifndef TANGRAM_FAKE_HIDE_H
#define TANGRAM_FAKE_HIDE_H

#include <stdbool.h>

/* dlsym no longer finds the exported symbols that `hidden` names; callers inside the library still reach them.
 * To be called while the library is loaded, before anybody else can look. False: the loader's table cannot be changed. */
bool hide_symbols(bool (*hidden)(const char *symbol));

#endif
