// Package browser tries the extender's web page in a real browser, headless Chromium: on the real extender beside a real
// control plane, and with a thousand nodes.
package browser
