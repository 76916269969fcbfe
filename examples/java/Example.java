import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import pyruntime.v1.Capability;
import pyruntime.v1.EmbedRequest;
import pyruntime.v1.EmbedResponse;
import pyruntime.v1.EmbedResult;
import pyruntime.v1.EmbedServiceGrpc;
import pyruntime.v1.Encoding;
import pyruntime.v1.GenerateChunk;
import pyruntime.v1.GenerateRequest;
import pyruntime.v1.GenerateServiceGrpc;
import pyruntime.v1.Input;
import pyruntime.v1.ItemScore;
import pyruntime.v1.ListModelsRequest;
import pyruntime.v1.Model;
import pyruntime.v1.ModelServiceGrpc;
import pyruntime.v1.Sampling;
import pyruntime.v1.ScoreRequest;
import pyruntime.v1.ScoreServiceGrpc;
import pyruntime.v1.Stop;

/** One call of each kind to a pyruntime server; build.sh builds it and says how to run it. */
public final class Example {
  private static final int CALL_SECONDS = 60;
  private static final Metadata.Key<String> REQUEST_ID =
      Metadata.Key.of("x-request-id", Metadata.ASCII_STRING_MARSHALLER);

  private final ManagedChannel channel;

  private Example(String address) {
    // One channel, kept. With TLS: useTransportSecurity() in place of usePlaintext(); for a token, withCallCredentials.
    channel =
        NettyChannelBuilder.forTarget(address)
            .usePlaintext()
            .maxInboundMessageSize(Integer.MAX_VALUE)
            .keepAliveTime(1, TimeUnit.MINUTES)
            .defaultServiceConfig(retries())
            .enableRetry()
            .build();
  }

  public static void main(String[] arguments) throws Exception {
    Example example = new Example(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051");
    try {
      example.generate();
      example.embed();
      example.score();
      example.showError();
      example.showDeadline();
    } finally {
      example.channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  /** As deploy/service-config.json has it: gRPC sends again what the server could not take, when it says. */
  private static Map<String, Object> retries() {
    Map<String, Object> policy =
        Map.of(
            "maxAttempts", 5.0,
            "initialBackoff", "0.2s",
            "maxBackoff", "5s",
            "backoffMultiplier", 2.0,
            "retryableStatusCodes", List.of("UNAVAILABLE", "RESOURCE_EXHAUSTED"));
    List<Map<String, Object>> names =
        List.of(
            Map.of("service", GenerateServiceGrpc.SERVICE_NAME),
            Map.of("service", EmbedServiceGrpc.SERVICE_NAME, "method", "Embed"),
            Map.of("service", ScoreServiceGrpc.SERVICE_NAME),
            Map.of("service", ModelServiceGrpc.SERVICE_NAME));
    return Map.of("methodConfig", List.of(Map.of("name", names, "retryPolicy", policy)));
  }

  private String modelFor(Capability capability) {
    ListModelsRequest request = ListModelsRequest.getDefaultInstance();
    for (Model model :
        ModelServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS)
            .listModels(request)
            .getModelsList()) {
      if (model.getCapabilitiesList().contains(capability)) {
        return model.getName();
      }
    }
    throw new IllegalStateException("no served model has " + capability);
  }

  /** Text as it grows. Cancelling the surrounding io.grpc.Context stops the server's work. */
  private void generate() {
    GenerateRequest request =
        prompt()
            .setSampling(Sampling.newBuilder().setTemperature(0))
            .setStop(Stop.newBuilder().setMaxNewTokens(16))
            .build();
    Iterator<GenerateChunk> chunks = generator().generateStream(request);
    StringBuilder text = new StringBuilder();
    while (chunks.hasNext()) {
      text.append(chunks.next().getText());
    }
    System.out.println("generated: " + text);
  }

  /** Two vectors, one of a text that is blank: its error stands in its place. */
  private void embed() {
    EmbedRequest request =
        EmbedRequest.newBuilder()
            .setModel(modelFor(Capability.CAPABILITY_EMBED))
            .addInputs(text("A cat sits on the mat."))
            .addInputs(text(" "))
            .setEncoding(Encoding.ENCODING_FLOAT32_LE)
            .build();
    EmbedResponse response =
        EmbedServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS)
            .embed(request);
    for (EmbedResult result : response.getResultsList()) {
      if (result.hasError()) {
        System.out.println("embedded: " + result.getIndex() + " " + result.getError().getMessage());
        continue;
      }
      FloatBuffer packed =
          result.getDense().getPacked().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
      float[] vector = new float[packed.remaining()];
      packed.get(vector);
      System.out.println("embedded: " + result.getIndex() + " " + vector.length + " numbers");
    }
  }

  /** How likely each label is behind a query and each item. */
  private void score() {
    String labels = System.getenv().getOrDefault("LABELS", " yes, no");
    ScoreRequest request =
        ScoreRequest.newBuilder()
            .setModel(modelFor(Capability.CAPABILITY_SCORE))
            .setQuery(text("Is this an animal? "))
            .addItems(text("A horse. Answer:"))
            .addItems(text("A spoon. Answer:"))
            .addAllLabels(Arrays.asList(labels.split(",")))
            .setApplySoftmax(true)
            .build();
    for (ItemScore item :
        ScoreServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS)
            .score(request)
            .getResultsList()) {
      System.out.println("scores: " + item.getIndex() + " " + item.getScoresList());
    }
  }

  /** What the server says of a bad request, field by field. */
  private void showError() throws InvalidProtocolBufferException {
    Metadata named = new Metadata();
    named.put(REQUEST_ID, "java-example-1");
    GenerateRequest request = prompt().setSampling(Sampling.newBuilder().setTemperature(-1)).build();
    try {
      generator().withInterceptors(MetadataUtils.newAttachHeadersInterceptor(named)).generate(request);
    } catch (StatusRuntimeException error) {
      System.out.println("error: " + error.getStatus().getCode() + " " + error.getTrailers().get(REQUEST_ID));
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          System.out.println("  reason: " + detail.unpack(ErrorInfo.class).getReason());
        } else if (detail.is(RetryInfo.class)) {
          System.out.println("  try again after: " + detail.unpack(RetryInfo.class).getRetryDelay().getSeconds() + " s");
        } else if (detail.is(BadRequest.class)) {
          for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            System.out.println("  field: " + violation.getField() + " " + violation.getDescription());
          }
        }
      }
    }
  }

  /** A call that has no time: the work ends on both sides. */
  private void showDeadline() {
    GenerateRequest request = prompt().build();
    try {
      GenerateServiceGrpc.newBlockingStub(channel).withDeadlineAfter(1, TimeUnit.MICROSECONDS).generate(request);
    } catch (StatusRuntimeException error) {
      System.out.println("deadline: " + error.getStatus().getCode());
    }
  }

  private GenerateServiceGrpc.GenerateServiceBlockingStub generator() {
    return GenerateServiceGrpc.newBlockingStub(channel).withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS);
  }

  private GenerateRequest.Builder prompt() {
    return GenerateRequest.newBuilder()
        .setModel(modelFor(Capability.CAPABILITY_GENERATE))
        .setText("The three primary colours are");
  }

  private static Input text(String value) {
    return Input.newBuilder().setText(value).build();
  }
}
