/* launcher.c - a statically linked program that takes LD_PRELOAD out of the environment and becomes another program. */
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **words)
{
    unsetenv("LD_PRELOAD");
    if (count > 1)
        execv(words[1], words + 1);
    return 1;
}
