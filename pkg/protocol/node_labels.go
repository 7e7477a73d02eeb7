package protocol

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"

	corev1 "k8s.io/api/core/v1"
)

// labelPrefix is the prefix of gpushare's own labels and annotations.
const labelPrefix = "gpushare.aliyun.com/"

// nodeLabels are the labels of nodes with that prefix that gpushare reads.
var nodeLabels = []string{LabelConfig, LabelIsolation, LabelPool}

// SharingLabel returns the value of the label by which the node should share its cards; false if it has none. A release of the chart with a
// device plugin alone has another value than "true".
func SharingLabel(node *corev1.Node) (value string, labelled bool) {
	value = node.Labels[LabelShared]
	return value, value != "" && value != "false"
}

// UnreadLabel says which label of the node was probably meant for gpushare and has no effect, and what to write instead; "" if there is none. It
// is a label with a key such as gpu-share on a node without LabelShared, or an unknown one with gpushare's prefix.
func UnreadLabel(node *corev1.Node) string {
	_, shared := node.Labels[LabelShared]
	for _, key := range slices.Sorted(maps.Keys(node.Labels)) {
		value := node.Labels[key]
		switch {
		case key == LabelShared || value == "false" || slices.Contains(nodeLabels, key):
		case !shared && letters(key[strings.Index(key, "/")+1:]) == LabelShared:
			return fmt.Sprintf("the label %s=%s has no effect: write %s=true", key, value, LabelShared)
		case strings.HasPrefix(key, labelPrefix):
			return fmt.Sprintf("the label %s=%s has no effect: remove it, or write one of the labels of nodes that gpushare reads: %s",
				key, value, strings.Join(nodeLabels, ", "))
		}
	}
	return ""
}

// letters returns the letters of the text, as small ones.
func letters(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) {
			return unicode.ToLower(r)
		}
		return -1
	}, text)
}
