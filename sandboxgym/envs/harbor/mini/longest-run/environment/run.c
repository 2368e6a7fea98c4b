#include <stdio.h>
#include <string.h>

int main(void)
{
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        char best = '-';
        int longest = 0, length = 1;
        for (int i = 1; line[i]; i++) {
            if (line[i] == line[i - 1]) {
                length++;
            } else {
                if (length > longest) {
                    longest = length;
                    best = line[i - 1];
                }
                length = 1;
            }
        }
        printf("%c %d\n", best, longest);
    }
    return 0;
}
