#!/bin/bash
cat > /app/run.c << 'SOURCE'
#include <stdio.h>

int main(void)
{
    int character, last = -1, best = '-', any = 0;
    long longest = 0, length = 0;
    for (;;) {
        character = getchar();
        int end = character == EOF || character == '\n';
        if (character == EOF && !any)
            return 0;
        any = 1;
        if (!end && character == last) {
            length++;
        } else {
            last = end ? -1 : character;
            length = end ? 0 : 1;
        }
        if (length > longest) {
            longest = length;
            best = character;
        }
        if (end) {
            printf("%c %ld\n", best, longest);
            if (character == EOF)
                return 0;
            best = '-', longest = 0, any = 0;
        }
    }
}
SOURCE
cd /app && make
