// Package browser tests the extender's web page in headless Chromium: on the real extender with a real control plane, and
// with a thousand nodes.
package browser
