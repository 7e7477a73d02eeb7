package helm

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

const folder = "../../deploy/helm/gpushare"

// injected is the key that the odd values try to add.
const injected = "INJECTED"

// odd are values that users give by mistake, and texts that would become YAML of their own if a template didn't quote them.
var odd = []any{
	nil, true, -1, "", " ", "x: y", "a #b", "'", "true", "123", "{{ .Values }}", "a\n" + injected + ": true", "x}, " + injected + ": {a: b",
	strings.Repeat("x", 300), []any{}, []any{nil}, []any{"a\n" + injected + ": true"}, []any{map[string]any{"name": "a\n" + injected + ": true"}},
	map[string]any{}, map[string]any{"a": "b\n" + injected + ": true"},
}

// bases are values with which the templates use a value; the longest prefix of the value's path counts.
var bases = map[string]string{
	"": `
extender:
  fairShare: {mode: reclaim}
  overusePolicy: evict
  ui: {listenAddress: ":8080"}
  tls: {mode: secret, secretName: tls}
devicePlugin:
  hostPID: true
  isolation: mps
  runtimeClassName: nvidia
  config: {default: a, map: {a: {memoryUnit: MiB}}}
mps: {enabled: true}
networkPolicy: {enabled: true}
monitoring:
  enabled: true
  authorize: true
  credentials: {name: token}
  prometheusRule: {enabled: true}
  dashboard: {enabled: true}
`,
	"secondScheduler":              "mode: secondScheduler",
	"images.scheduler":             "mode: secondScheduler",
	"devicePlugin.memoryUnit":      "{}",
	"devicePlugin.simulatedCards":  "{devicePlugin: {simulatedCards: {count: 2}}, extender: {tls: {mode: secret, secretName: tls}}}",
	"images.simulatedDevicePlugin": "{devicePlugin: {simulatedCards: {count: 2}}, extender: {tls: {mode: secret, secretName: tls}}}",
	"devicePlugin.cdi":             "{devicePlugin: {deviceListStrategy: cdi-cri}, extender: {tls: {mode: secret, secretName: tls}}}",
	"extender.tls.certManager":     "extender: {tls: {mode: certManager, certManager: {issuerRef: {name: ca}}}}",
}

// property is a value in the chart's schema.
type property struct {
	Type                 any
	Enum                 []any
	Properties           map[string]*property
	Required             []string
	AdditionalProperties any
}

func schema(t *testing.T) *property {
	t.Helper()
	text, err := os.ReadFile(folder + "/values.schema.json")
	must(t, err)
	var root property
	must(t, json.Unmarshal(text, &root))
	return &root
}

// walk calls visit for each value, parents first.
func (p *property) walk(path []string, visit func(path []string, p *property)) {
	for _, name := range slices.Sorted(maps.Keys(p.Properties)) {
		inner := append(slices.Clone(path), name)
		visit(inner, p.Properties[name])
		p.Properties[name].walk(inner, visit)
	}
}

// TestSchema: the schema knows each value of values.yaml and its type. Helm removes a value that is null, and a template would take it for
// false or 0, so each value is required whose absence doesn't mean the default anyway.
func TestSchema(t *testing.T) {
	root := schema(t)
	var check func(path string, p *property, defaults map[string]any)
	check = func(path string, p *property, defaults map[string]any) {
		var required []string
		for name, value := range defaults {
			inner := p.Properties[name]
			if inner == nil {
				t.Errorf("%s.%s is not in the schema", path, name)
				continue
			}
			if !empty(value) {
				required = append(required, name)
			}
			if nested, ok := value.(map[string]any); ok && len(inner.Properties) > 0 {
				check(path+"."+name, inner, nested)
			}
		}
		slices.Sort(required)
		if got := slices.Sorted(slices.Values(p.Required)); !slices.Equal(required, got) {
			t.Errorf("%s requires %q, want %q", path, got, required)
		}
	}
	check("", root, load(t).Values)
	root.walk(nil, func(path []string, p *property) {
		if p.Type == nil && len(p.Enum) == 0 {
			t.Errorf("%s has no type", strings.Join(path, "."))
		}
	})
}

func empty(value any) bool {
	switch v := value.(type) {
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	}
	return false
}

// TestOddValues sets each value to each odd one. The chart refuses it with an error that names the value, or renders objects of the API's types
// that have no foreign key. Null means the default, if it is not refused.
func TestOddValues(t *testing.T) {
	log.SetOutput(io.Discard) // Helm warns of each value that it ignores because its type is wrong.
	defer log.SetOutput(os.Stderr)
	renderer := newRenderer(t)
	schema(t).walk(nil, func(path []string, _ *property) {
		name := strings.Join(path, ".")
		base := baseOf(t, name)
		for _, value := range odd {
			text, err := json.Marshal(value)
			must(t, err)
			objects, err := renderer.render(with(base, path, value))
			if err != nil {
				if !names(err.Error(), path) {
					t.Errorf("%s=%.60s: the error doesn't name the value: %v", name, text, err)
				}
				continue
			}
			for _, problem := range problems(objects) {
				t.Errorf("%s=%.60s: %s", name, text, problem)
			}
			if value == nil {
				byDefault, err := renderer.render(without(base, path))
				if err != nil || !reflect.DeepEqual(objects, byDefault) {
					t.Errorf("%s=null is accepted and isn't the default (%v)", name, err)
				}
			}
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T) *chartv2.Chart {
	t.Helper()
	chart, err := loader.Load(folder)
	must(t, err)
	return chart
}

func baseOf(t *testing.T, name string) map[string]any {
	t.Helper()
	longest := ""
	for prefix := range bases {
		if strings.HasPrefix(name, prefix) && len(prefix) > len(longest) {
			longest = prefix
		}
	}
	var values map[string]any
	must(t, yaml.Unmarshal([]byte(bases[longest]), &values))
	return with(values, []string{"extender", "service", "clusterIP"}, "10.96.0.15")
}

// with returns a copy of the values in which the value at the path is set.
func with(values map[string]any, path []string, value any) map[string]any {
	out := maps.Clone(values)
	if out == nil {
		out = map[string]any{}
	}
	if len(path) > 1 {
		inner, _ := out[path[0]].(map[string]any)
		value = with(inner, path[1:], value)
	}
	out[path[0]] = value
	return out
}

// without returns a copy of the values in which the value at the path isn't set.
func without(values map[string]any, path []string) map[string]any {
	out := maps.Clone(values)
	if len(path) == 1 {
		delete(out, path[0])
	} else if inner, ok := out[path[0]].(map[string]any); ok {
		out[path[0]] = without(inner, path[1:])
	}
	return out
}

// renderer does what "helm template" does. It compiles the schema once, which takes Helm most of the time.
type renderer struct {
	chart        *chartv2.Chart
	schema       *jsonschema.Schema
	capabilities *common.Capabilities
}

func newRenderer(t *testing.T) renderer {
	t.Helper()
	schema, err := jsonschema.NewCompiler().Compile(folder + "/values.schema.json")
	must(t, err)
	version, err := common.ParseKubeVersion("v1.37.2")
	must(t, err)
	capabilities := common.DefaultCapabilities.Copy()
	capabilities.KubeVersion = *version
	return renderer{load(t), schema, capabilities}
}

// render returns the objects as text, by the template's name and the object's position.
func (r renderer) render(values map[string]any) (map[string]string, error) {
	files, err := r.files(values, common.ReleaseOptions{})
	if err != nil {
		return nil, err
	}
	objects := map[string]string{}
	for name, text := range files {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		for i, document := range strings.Split("\n"+text, "\n---\n") {
			if strings.TrimSpace(document) != "" {
				objects[fmt.Sprint(name, " ", i)] = document
			}
		}
	}
	return objects, nil
}

// files returns the rendered templates by their names.
func (r renderer) files(values map[string]any, release common.ReleaseOptions) (map[string]string, error) {
	release.Name, release.Namespace = "gpushare", "gpu"
	input, err := util.ToRenderValuesWithSchemaValidation(r.chart, values, release, r.capabilities, true)
	if err != nil {
		return nil, err
	}
	if err := r.schema.Validate(input["Values"].(common.Values).AsMap()); err != nil {
		return nil, err
	}
	return engine.Engine{}.Render(r.chart, input)
}

// names reports whether an error is the schema's about the value or the one that contains it, or the chart's own about the value.
func names(message string, path []string) bool {
	last := len(path) - 1
	return strings.Contains(message, "at '/"+strings.Join(path, "/")) ||
		strings.Contains(message, "at '"+strings.Join(append([]string{""}, path[:last]...), "/")+"': missing property '"+path[last]+"'") ||
		strings.Contains(message, "execution error at") && strings.Contains(message, strings.Join(path, "."))
}

var decoder = scheme.Codecs.UniversalDeserializer()

// problems returns what is wrong with rendered objects.
func problems(objects map[string]string) (out []string) {
	for name, text := range objects {
		var object any
		data, err := yaml.YAMLToJSONStrict([]byte(text))
		if err == nil {
			err = json.Unmarshal(data, &object)
		}
		if err == nil {
			if _, _, err = decoder.Decode(data, nil, nil); runtime.IsNotRegisteredError(err) {
				err = nil // Of another project's API.
			}
		}
		if object == nil && err != nil && strings.TrimSpace(string(data)) == "null" {
			continue // Only comments.
		}
		if err != nil {
			out = append(out, fmt.Sprintf("%s: %v", name, err))
		}
		if hasKey(object) {
			out = append(out, name+" has a foreign key")
		}
	}
	return out
}

// hasKey reports whether a map in the value has a key that an odd value added.
func hasKey(value any) bool {
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			if strings.Contains(key, injected) || hasKey(inner) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, hasKey)
	case string:
		// A text that is itself YAML, such as kube-scheduler's configuration.
		var inner map[string]any
		return strings.Contains(v, "\n"+injected) && yaml.Unmarshal([]byte(v), &inner) == nil && hasKey(inner)
	}
	return false
}
