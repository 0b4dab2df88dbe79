"""An interactive page that needs no network: what position schemes do as the text grows, drawn in the browser."""
