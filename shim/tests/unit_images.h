/* unit_images.h - see unit_images.c. */
#ifndef TANGRAM_UNIT_IMAGES_H
#define TANGRAM_UNIT_IMAGES_H

void images_are_read(void);

#endif
