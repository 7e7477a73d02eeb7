package docs

import (
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// What a reader copies from a page is at least what the API server can read.
func TestExamplesCanBeRead(t *testing.T) {
	pods, blocks := 0, 0
	for _, page := range pages(t) {
		for _, block := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(read(t, page), -1) {
			for text := range strings.SplitSeq(block[1], "\n---\n") {
				blocks++
				var anything map[string]any
				if err := yaml.UnmarshalStrict([]byte(text), &anything); err != nil {
					t.Errorf("%s: %v in\n%s", page, err, text)
				}
				if anything["kind"] != "Pod" {
					continue
				}
				pods++
				if err := yaml.UnmarshalStrict([]byte(text), &corev1.Pod{}); err != nil {
					t.Errorf("%s: %v in\n%s", page, err, text)
				}
			}
		}
	}
	if pods < 3 || blocks < 6 {
		t.Errorf("found %d pods among %d examples: this test shows little", pods, blocks)
	}
}
