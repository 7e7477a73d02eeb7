package protocol

import (
	"strings"
	"unicode/utf8"
)

// MaxText is the most bytes of a text that is shown on the page, in a log line or in an Event, or kept of a pod. It is the limit of
// Kubernetes for messages of Events (k8s.io/kubernetes pkg/apis/core/validation/events.go).
const MaxText = 1024

// Shorten returns the text if it has at most MaxText bytes, otherwise its beginning and "…". The result shares no memory with a longer
// text. Names of pods, nodes and resources are shorter always.
func Shorten(text string) string {
	if len(text) <= MaxText {
		return text
	}
	const ellipsis = "…"
	end := MaxText - len(ellipsis)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.Clone(text[:end]) + ellipsis
}
