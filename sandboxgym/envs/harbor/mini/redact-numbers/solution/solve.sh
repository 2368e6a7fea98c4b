#!/bin/bash
cat > /app/redact.sed << 'SCRIPT'
# The markers are not in the text: a card number between them is neither part of a longer number nor of a longer row.
s/.*/ \n&\n /
:next
s/(^|[^0-9 -]|[^0-9][ -])([0-9]{4})([ -]?)([0-9]{4})\3([0-9]{4})\3([0-9]{4})($|[^0-9 -]|[ -]([^0-9]|$))/\1xxxx\3xxxx\3xxxx\3\6\7/
t next
s/^ \n//
s/\n $//
SCRIPT
