import { defineConfig } from "vite";

// The server sends the files as they are: no inline script, so that its content policy holds. All
// but index.html lies in assets/, which needs no sign-in: nothing of an experiment is in it.
export default defineConfig({
  build: {
    outDir: "../zeroserver/static",
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
  },
  server: { proxy: { "/api": "http://127.0.0.1:8080" } },
});
