"""An interactive page that needs no network: what position schemes do, redrawn in the browser as sliders move."""
