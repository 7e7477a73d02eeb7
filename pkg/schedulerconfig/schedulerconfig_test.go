package schedulerconfig

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/test/controlplane"
)

var options = Options{
	Path: "/gpushare-scheduler", BindTimeout: 4 * time.Second, GangHold: 10 * time.Second, NodesToScore: 100, Proxy: proxy(""),
	ClientNames: []string{"kube-scheduler"}, Now: time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC), ReadFile: os.ReadFile,
}

// proxy returns Options.Proxy for an environment in which this proxy is set for all addresses.
func proxy(address string) func(*http.Request) (*url.URL, error) {
	return func(*http.Request) (*url.URL, error) {
		if address == "" {
			return nil, nil
		}
		return url.Parse(address)
	}
}

// valid is a configuration without findings. Each test row changes one line.
const valid = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
percentageOfNodesToScore: 100
podMaxBackoffSeconds: 5
extenders:
- urlPrefix: http://127.0.0.1:12345/gpushare-scheduler
  filterVerb: filter
  prioritizeVerb: prioritize
  bindVerb: bind
  preemptVerb: preempt
  weight: 100
  httpTimeout: 15s
  nodeCacheCapable: true
  managedResources:
  - name: aliyun.com/gpu-mem
`

const (
	encrypted = "https://10.96.0.15:12345/gpushare-scheduler\n  enableHTTPS: true\n  tlsConfig: "
	other     = "\n- urlPrefix: http://127.0.0.1:1/other\n  "
)

// change is a change of the valid configuration.
type change struct {
	old, new string
	options  func(*Options)
	// want are the findings without their texts.
	want []string
	// refused is true if kube-scheduler itself refuses the configuration.
	refused bool
}

var changes = map[string]change{
	"valid":                           {},
	"the shortest timeout":            {old: "15s", new: "14.001s"},
	"groups switched off":             {old: "15s", new: "5s", options: func(o *Options) { o.GangHold = 0 }},
	"a slash at the URL's end":        {old: "gpushare-scheduler", new: "gpushare-scheduler/"},
	"no extender":                     {old: valid[strings.Index(valid, "extenders:"):], new: "", want: []string{"error: extenders"}},
	"another extender alone":          {old: "12345/gpushare-scheduler", new: "12345/other\n  #", want: []string{"error: extenders[0].urlPrefix"}},
	"an extender of something else":   {old: valid[strings.Index(valid, "- urlPrefix"):], new: "- urlPrefix: http://127.0.0.1/other\n", want: []string{"error: extenders"}},
	"two entries":                     {old: "extenders:", new: "extenders:\n- urlPrefix: http://127.0.0.1:2/gpushare-scheduler\n  filterVerb: filter", want: []string{"error: extenders[1]", "warning: extenders[0].prioritizeVerb", "error: extenders[0].bindVerb", "warning: extenders[0].preemptVerb", "error: extenders[0].httpTimeout", "warning: extenders[0].nodeCacheCapable", "error: extenders[0].managedResources"}},
	"no URL":                          {old: "http://127.0.0.1:12345/gpushare-scheduler", new: `""`, want: []string{"error: extenders[0].urlPrefix"}},
	"the port of the web page":        {old: "12345", new: "12346", options: func(o *Options) { o.PagePort = "12346" }, want: []string{"error: extenders[0].urlPrefix"}},
	"no port":                         {old: ":12345", new: "", want: []string{"warning: extenders[0].urlPrefix"}},
	"a URL of another kind":           {old: "http:", new: "ftp:", want: []string{"error: extenders[0].urlPrefix"}},
	"a proxy":                         {options: func(o *Options) { o.Proxy = proxy("http://user:secret@proxy.example.com:3128") }, want: []string{"warning: extenders[0].urlPrefix"}},
	"a proxy that is no address":      {options: func(o *Options) { o.Proxy = proxy("%") }, want: []string{"warning: extenders[0].urlPrefix"}},
	"no filter verb":                  {old: "filterVerb: filter", new: "", want: []string{"error: extenders[0].filterVerb"}},
	"a filter verb that is unknown":   {old: "filterVerb: filter", new: "filterVerb: predicates", want: []string{"error: extenders[0].filterVerb"}},
	"no bind verb":                    {old: "bindVerb: bind", new: "", want: []string{"error: extenders[0].bindVerb"}},
	"no preempt verb":                 {old: "preemptVerb: preempt", new: "", want: []string{"warning: extenders[0].preemptVerb"}},
	"no prioritize verb":              {old: "prioritizeVerb: prioritize", new: "", want: []string{"warning: extenders[0].prioritizeVerb"}},
	"no weight":                       {old: "weight: 100", new: "", want: []string{"error: extenders[0].weight"}, refused: true},
	"little weight":                   {old: "weight: 100", new: "weight: 1", want: []string{"warning: extenders[0].weight"}},
	"too short a timeout":             {old: "15s", new: "14s", want: []string{"error: extenders[0].httpTimeout"}},
	"no timeout":                      {old: "httpTimeout: 15s", new: "", want: []string{"error: extenders[0].httpTimeout"}},
	"slow binds":                      {options: func(o *Options) { o.BindTimeout = 5 * time.Second }, want: []string{"error: extenders[0].httpTimeout"}},
	"whole nodes":                     {old: "nodeCacheCapable: true", new: "", want: []string{"warning: extenders[0].nodeCacheCapable"}},
	"ignorable":                       {old: "nodeCacheCapable: true", new: "nodeCacheCapable: true\n  ignorable: true", want: []string{"error: extenders[0].ignorable"}},
	"no managed resources":            {old: "managedResources:\n  - name: aliyun.com/gpu-mem", new: "", want: []string{"error: extenders[0].managedResources"}},
	"another managed resource":        {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem\n  - name: example.com/fpga", want: []string{"warning: extenders[0].managedResources[1]"}},
	"cores":                           {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem\n  - name: aliyun.com/gpu-core.percentage"},
	"cores ignored by the scheduler":  {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem\n  - name: aliyun.com/gpu-core.percentage\n    ignoredByScheduler: true", want: []string{"error: extenders[0].managedResources[1].ignoredByScheduler"}},
	"ignored by the scheduler":        {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem\n    ignoredByScheduler: true", want: []string{"error: extenders[0].managedResources[0].ignoredByScheduler"}},
	"a sample of the nodes":           {old: "ToScore: 100", new: "ToScore: 99", want: []string{"warning: percentageOfNodesToScore"}},
	"kube-scheduler's own sample":     {old: "percentageOfNodesToScore: 100", new: "", want: []string{"warning: percentageOfNodesToScore"}},
	"a sample that is expected":       {old: "ToScore: 100", new: "ToScore: 20", options: func(o *Options) { o.NodesToScore = 10 }},
	"a smaller sample":                {old: "ToScore: 100", new: "ToScore: 9", want: []string{"warning: percentageOfNodesToScore"}, options: func(o *Options) { o.NodesToScore = 10 }},
	"all nodes for a sample":          {options: func(o *Options) { o.NodesToScore = 10 }},
	"a sample in one profile":         {old: "extenders:", new: "profiles:\n- schedulerName: a\n- schedulerName: b\n  percentageOfNodesToScore: 0\nextenders:", want: []string{"warning: profiles[1].percentageOfNodesToScore"}},
	"a sample that no profile uses":   {old: "percentageOfNodesToScore: 100", new: "profiles:\n- schedulerName: a\n  percentageOfNodesToScore: 100"},
	"the default back-off":            {old: "podMaxBackoffSeconds: 5", new: "", want: []string{"warning: podMaxBackoffSeconds"}},
	"the default without groups":      {old: "podMaxBackoffSeconds: 5", new: "", options: func(o *Options) { o.GangHold = 0 }},
	"a long back-off":                 {old: "podMaxBackoffSeconds: 5", new: "podMaxBackoffSeconds: 11", want: []string{"warning: podMaxBackoffSeconds"}},
	"the longest back-off of all":     {old: "podMaxBackoffSeconds: 5", new: "podMaxBackoffSeconds: 9223372036854775807", want: []string{"warning: podMaxBackoffSeconds"}},
	"separators around":               {old: valid, new: "%YAML 1.1\n---" + valid + "---\n# no more\n---\n"},
	"a filter before":                 {old: "extenders:", new: "extenders:" + other + "filterVerb: filter"},
	"an ignorable filter before":      {old: "extenders:", new: "extenders:" + other + "filterVerb: filter\n  ignorable: true", want: []string{"warning: extenders[0]"}},
	"a filter after":                  {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem" + other + "filterVerb: filter", want: []string{"warning: extenders[1]"}},
	"scores after":                    {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem" + other + "prioritizeVerb: prioritize\n  weight: 1"},
	"another binder":                  {old: "extenders:", new: "extenders:" + other + "bindVerb: bind", want: []string{"error: extenders[0].bindVerb"}, refused: true},
	"a Service's name":                {old: "127.0.0.1", new: "gpushare-extender.kube-system.svc", want: []string{"warning: extenders[0].urlPrefix", "warning: extenders[0].urlPrefix"}},
	"plain HTTP to elsewhere":         {old: "127.0.0.1", new: "10.96.0.15", want: []string{"warning: extenders[0].urlPrefix"}},
	"TLS settings without TLS":        {old: "weight: 100", new: "weight: 100\n  enableHTTPS: true", want: []string{"warning: extenders[0].tlsConfig"}},
	"TLS":                             {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{caFile: ca, certFile: crt, keyFile: key}"},
	"TLS without anything":            {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{}", want: []string{"warning: extenders[0].tlsConfig", "warning: extenders[0].tlsConfig"}},
	"TLS without a check":             {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{insecure: true, certFile: crt, keyFile: key}", want: []string{"warning: extenders[0].tlsConfig"}},
	"a CA that isn't used":            {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{insecure: true, caFile: ca, certFile: crt, keyFile: key}", want: []string{"error: extenders[0].tlsConfig.insecure"}},
	"a certificate without its key":   {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{caFile: ca, certFile: crt}", want: []string{"error: extenders[0].tlsConfig"}},
	"an invalid CA":                   {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{caData: aGVsbG8=, certFile: crt, keyFile: key}", want: []string{"error: extenders[0].tlsConfig.caData"}},
	"an invalid certificate":          {old: "http://127.0.0.1:12345/gpushare-scheduler", new: encrypted + "{caFile: ca, certData: aGVsbG8=, keyData: aGVsbG8=}", want: []string{"error: extenders[0].tlsConfig.certData"}},
	"the system's CAs, without more":  {old: "http://127.0.0.1:12345/gpushare-scheduler", new: strings.Replace(encrypted, "enableHTTPS: true", "enableHTTPS: false", 1) + "{certFile: crt, keyFile: key}"},
	"a resource of two extenders":     {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem" + other + "managedResources: [{name: aliyun.com/gpu-mem}]", want: []string{"error: extenders[1]"}, refused: true},
	"whole cards, for groups":         {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem\n  - name: nvidia.com/gpu"},
	"whole cards that aren't counted": {old: "aliyun.com/gpu-mem", new: "aliyun.com/gpu-mem\n  - name: nvidia.com/gpu\n    ignoredByScheduler: true", want: []string{"error: extenders[0].managedResources[1].ignoredByScheduler"}},
}

func TestCheck(t *testing.T) {
	for name, test := range changes {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(valid, test.old) {
				t.Fatalf("the configuration lacks %q", test.old)
			}
			config, err := Decode([]byte(strings.Replace(valid, test.old, test.new, 1)))
			if err != nil {
				t.Fatal(err)
			}
			o := options
			if test.options != nil {
				test.options(&o)
			}
			var got []string
			for _, finding := range Check(config, o) {
				if line := finding.String(); finding.Text == "" || strings.Contains(line, "secret") || strings.Contains(line, "\n") || strings.Contains(line, "%!") {
					t.Errorf("the finding reads %q", line)
				}
				got = append(got, string(finding.Severity)+": "+finding.Path)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("findings (-want +got):\n%s%v", diff, Check(config, o))
			}
		})
	}
}

// TestCertificates: certificates with which no call succeeds are errors, in the configuration and in files.
func TestCertificates(t *testing.T) {
	const valid, expired, early = time.Hour, -time.Minute, 3 * time.Hour
	for name, test := range map[string]struct {
		name string
		ends time.Duration
		want string
	}{
		"valid":              {"kube-scheduler", valid, ""},
		"expired":            {"kube-scheduler", expired, "the certificate expired at 2026-07-01T11:59:00Z"},
		"not valid yet":      {"kube-scheduler", early, "isn't valid before 2026-07-01T13:00:00Z"},
		"of another program": {"system:kube-scheduler", valid, `the common name "system:kube-scheduler", and the extender's --client-names allows kube-scheduler`},
	} {
		t.Run(name, func(t *testing.T) {
			crt, key := certificate(t, test.name, options.Now.Add(test.ends-2*time.Hour), options.Now.Add(test.ends))
			file := filepath.Join(t.TempDir(), "tls.crt")
			if err := os.WriteFile(file, crt, 0o600); err != nil {
				t.Fatal(err)
			}
			for where, tls := range map[string]schedulerv1.ExtenderTLSConfig{
				"certData": {CAFile: "none", CertData: crt, KeyData: key}, "certFile": {CAFile: "none", CertFile: file, KeyFile: "none"},
			} {
				c := &check{Options: options}
				c.tls(field.NewPath("extenders").Index(0), &schedulerv1.Extender{TLSConfig: &tls})
				var got string
				for _, finding := range c.findings {
					got += finding.String() + "\n"
				}
				if test.want == "" && got != "" || !strings.Contains(got, test.want) || test.want != "" && !strings.HasPrefix(got, "error: extenders[0].tlsConfig."+where+": ") {
					t.Errorf("%s: %q, want %q", where, got, test.want)
				}
			}
		})
	}
}

// certificate returns a self-signed certificate and its key, as PEM.
func certificate(t *testing.T, name string, from, to time.Time) (crt, key []byte) {
	t.Helper()
	_, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: to}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})
}

func TestDecodeErrors(t *testing.T) {
	for name, test := range map[string]struct{ config, want string }{
		"nothing":                 {" \n", "it is empty"},
		"no YAML":                 {"{{", "yaml: line 1"},
		"a misspelt field":        {strings.Replace(valid, "weight:", "wieght:", 1), `unknown field "extenders[0].wieght"`},
		"a field given twice":     {strings.Replace(valid, "  weight: 100", "  weight: 100\n  weight: 1", 1), `key "weight" already set`},
		"a misspelt argument":     {valid + "profiles:\n- pluginConfig:\n  - name: NodeResourcesFit\n    args: {ignoredResource: []}\n", `unknown field "ignoredResource"`},
		"words for a number":      {strings.Replace(valid, "weight: 100", "weight: much", 1), "cannot unmarshal string"},
		"no kind":                 {"a: b", "it has no kind or apiVersion, want a KubeSchedulerConfiguration of kubescheduler.config.k8s.io/v1"},
		"another version":         {strings.Replace(valid, "/v1", "/v1beta3", 1), "it is a KubeSchedulerConfiguration of kubescheduler.config.k8s.io/v1beta3, want"},
		"the whole ConfigMap":     {"apiVersion: v1\nkind: ConfigMap\n", "it is a ConfigMap of v1, want a KubeSchedulerConfiguration"},
		"arguments of a plugin":   {"apiVersion: kubescheduler.config.k8s.io/v1\nkind: NodeResourcesFitArgs\n", "it is a NodeResourcesFitArgs of kubescheduler.config.k8s.io/v1, want"},
		"an old policy file":      {`{"kind": "Policy", "apiVersion": "v1"}`, "it is a Policy of v1, want"},
		"another document behind": {valid + "---" + valid, "it has several documents: kube-scheduler reads the first one only"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Decode([]byte(test.config)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

// TestKubeSchedulerAgrees compares the findings with what kube-scheduler accepts. It reads the configuration, writes it, and exits.
func TestKubeSchedulerAgrees(t *testing.T) {
	kubeScheduler := "../../bin/kube/kube-scheduler"
	if _, err := os.Stat(kubeScheduler); err != nil && os.Getenv(controlplane.RequireEnv) == "" {
		t.Skip(err)
	}
	for name, test := range changes {
		if strings.Contains(test.new, "caFile") || strings.Contains(test.new, "certFile") {
			continue // It would read these files.
		}
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(path, []byte(strings.Replace(valid, test.old, test.new, 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(t.Context(), kubeScheduler, "--config="+path, "--write-config-to=/dev/null", "--master=http://127.0.0.1:1", "--secure-port=0").CombinedOutput()
			if refused := err != nil; refused != test.refused {
				t.Errorf("refused: %t, want %t: %v, %s", refused, test.refused, err, out)
			}
			if hasError := slices.ContainsFunc(test.want, func(finding string) bool { return strings.HasPrefix(finding, "error: ") }); test.refused && !hasError {
				t.Error("kube-scheduler refuses what the check passes")
			}
		})
	}
}

// TestShippedConfigurations checks that the shipped configuration has no findings, nor the one of the second scheduler, which
// is rendered from the chart.
func TestShippedConfigurations(t *testing.T) {
	plain, err := os.ReadFile("../../config/scheduler-config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	configs := map[string][]byte{"config/scheduler-config.yaml": plain}
	const second = "deploy/second-scheduler/scheduler.yaml"
	rendered, err := os.ReadFile("../../" + second)
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(rendered), "\n---\n") {
		var object corev1.ConfigMap
		if err := yaml.Unmarshal([]byte(document), &object); err == nil && object.Kind == "ConfigMap" {
			configs[second] = []byte(object.Data["scheduler-config.yaml"])
		}
	}
	if len(configs) < 2 {
		t.Fatal("found no configuration of the second scheduler")
	}
	for name, data := range configs {
		config, err := Decode(data)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, finding := range Check(config, options) {
			t.Errorf("%s: %s", name, finding)
		}
	}
}
