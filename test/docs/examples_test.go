package docs

import (
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/nodeconfig"
)

// All YAML examples must parse, and those of pods and of configurations must have only known fields.
func TestExamples(t *testing.T) {
	pods, configurations, blocks := 0, 0, 0
	for _, page := range pages(t) {
		for _, block := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(read(t, page), -1) {
			for text := range strings.SplitSeq(block[1], "\n---\n") {
				blocks++
				var anything map[string]any
				if err := yaml.UnmarshalStrict([]byte(text), &anything); err != nil {
					t.Errorf("%s: %v in\n%s", page, err, text)
				}
				if anything["kind"] == nodeconfig.Kind {
					configurations++
					if _, err := nodeconfig.Decode([]byte(text)); err != nil {
						t.Errorf("%s: %v in\n%s", page, err, text)
					}
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
	if pods < 3 || configurations < 1 || blocks < 6 {
		t.Errorf("too few examples: %d pods, %d configurations, %d in total", pods, configurations, blocks)
	}
}
